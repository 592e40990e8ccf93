"""The parts of PyTorch's work outside of compiled graphs, by the ranges and operations around its launches."""

from __future__ import annotations

from xlafuse.compare.profiles.host_parts import host_parts
from xlafuse.compare.profiles.join import join
from xlafuse.compare.profiles.kernel_times import kernel_times
from xlafuse.compare.profiles.model import DeviceEvent
from xlafuse.compare.profiles.steps import ProfiledStep

EVALUATE = "autograd::engine::evaluate_function: "
ADAMW = "Optimizer.step#AdamW.step"


def events_of(*paths: tuple[str, ...], name: str = "k") -> list[DeviceEvent]:
    """Return events that the host launched in this order."""
    return [DeviceEvent(name, 9 + at, 9.5 + at, launched=at, host_path=path) for at, path in enumerate(paths)]


def found(*paths: tuple[str, ...]) -> list[tuple[str, str]]:
    return [tuple(part) for part in host_parts(events_of(*paths))]


def test_a_training_step_has_forward_backward_and_update() -> None:
    node = f"{EVALUATE}MmBackward0"
    assert found(
        ("Optimizer.zero_grad#AdamW.zero_grad", "aten::zero_"), ("aten::linear", "aten::mm"),
        (node, "MmBackward0", "aten::mm"), ("aten::_amp_update_scale_",), (ADAMW, "aten::_foreach_add_"),
        ("aten::item",), (),
    ) == [
        ("AdamW.zero_grad", "update"), ("aten::linear", "forward"), ("MmBackward0", "backward"),
        ("aten::_amp_update_scale_", "update"), ("AdamW.step", "update"), ("aten::item", ""), ("", ""),
    ]


def test_gradients_that_are_clipped_are_known_by_norm_limit_and_scaling() -> None:
    backward = (f"{EVALUATE}MmBackward0",)
    clipping = [("aten::_foreach_norm", "aten::zeros"), ("aten::stack",), ("aten::clamp",), ("aten::_foreach_mul_",)]
    parts = found(backward, ("aten::div_",), *clipping, (ADAMW,))
    assert parts[1:-1] == [("aten::div_", "update"), *[("clip_grad_norm_", "update")] * 4]
    assert ("clip_grad_norm_", "update") not in found(*clipping, backward, (ADAMW,))
    assert ("clip_grad_norm_", "update") not in found(backward, ("aten::_foreach_norm",), ("aten::stack",), (ADAMW,))


def test_checkpointing_computes_forward_operations_again() -> None:
    checkpoint = f"{EVALUATE}CheckpointFunctionBackward"
    assert found((checkpoint, "aten::mm"), (checkpoint, f"{EVALUATE}MmBackward0", "aten::mm")) == [
        ("CheckpointFunctionBackward", "recompute"), ("MmBackward0", "backward"),
    ]


def test_work_before_the_first_of_two_optimizers_is_update() -> None:
    backward = (f"{EVALUATE}MmBackward0",)
    parts = found(backward, ("aten::div_",), (ADAMW,), ("aten::mm",), backward, (ADAMW,))
    assert [phase for _, phase in parts] == ["backward", "update", "update", "forward", "backward", "update"]


def test_kernels_of_one_name_have_a_line_for_each_part() -> None:
    events = events_of((f"{EVALUATE}MmBackward0",), (f"{EVALUATE}MmBackward0",), (ADAMW,), name="multi_tensor")
    steps = [ProfiledStep("step 3", tuple(events))]
    rows = kernel_times(steps, join(steps, {}), {})
    assert [(row.host_part, row.launches) for row in rows] == [
        (("MmBackward0", "backward"), 2), (("AdamW.step", "update"), 1),
    ]
