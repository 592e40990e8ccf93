"""Recording eager PyTorch on the CPU, on fake tensors, and one operation at a time."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from xlafuse.triton_side.blocks import attention, rmsnorm
from xlafuse.triton_side.calls import stages
from xlafuse.triton_side.calls.dispatch import Operation, Recorded, record_call, record_operations
from xlafuse.triton_side.calls.stages import stage


def operations(recorded: Recorded, part: str) -> list[Operation]:
    found = [event for event in recorded.parts[part] if isinstance(event, Operation)]
    assert len(found) == len(recorded.parts[part])
    return found


def rmsnorm_recorded() -> Recorded:
    x = torch.randn(4, 8, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(8, dtype=torch.bfloat16, requires_grad=True)
    return record_call(lambda inputs: rmsnorm.apply(inputs, eps=1e-6), {"x": x, "weight": weight}, train=True)


def test_forward_operations_with_stage_line_bytes_and_flow() -> None:
    recorded = rmsnorm_recorded()
    forward = operations(recorded, "forward")
    assert [operation.op for operation in forward] == [
        "aten._to_copy.default", "aten.mul.Tensor", "aten.mean.dim", "aten.add.Tensor", "aten.rsqrt.default",
        "aten.mul.Tensor", "aten._to_copy.default", "aten.mul.Tensor",
    ]
    assert [operation.kind for operation in forward[:3]] == ["elementwise", "elementwise", "reduction"]
    first, square, mean = forward[:3]
    assert first.flops == 32  # a conversion: one per element
    assert first.reads[0].storage == recorded.inputs["x"].storage
    assert (first.reads[0].bytes, first.writes[0].bytes) == (64, 128)
    # x * x reads one buffer once.
    assert [tensor.storage for tensor in square.reads] == [first.writes[0].storage]
    assert mean.writes[0].bytes == 16 and mean.flops == 32
    assert forward[-1].writes[0].storage == recorded.outputs["y"].storage
    assert len({operation.stage for operation in forward}) == 3 and "" not in {o.stage for o in forward}
    assert all("triton_side/blocks/rmsnorm.py:" in operation.line for operation in forward)
    assert not any(operation.backward for operation in forward)


def test_backward_operations_have_the_line_and_stage_of_their_forward_operation() -> None:
    recorded = rmsnorm_recorded()
    forward, backward = operations(recorded, "forward"), operations(recorded, "backward")
    assert all(operation.backward and not operation.rematerialized for operation in backward)
    last = forward[-1]
    assert {(o.line, o.stage) for o in backward[:3]} == {(last.line, last.stage)}
    assert backward[-1].line == forward[0].line and backward[-1].stage == forward[0].stage
    assert {o.line for o in backward} <= {o.line for o in forward}
    assert backward[-1].writes[0].storage == recorded.outputs["dx"].storage
    # The backward pass reads saved tensors under the storage number under which they were written.
    written = {tensor.storage for operation in forward for tensor in operation.writes}
    assert written & {tensor.storage for operation in backward for tensor in operation.reads}


def test_fake_tensors_need_no_device_and_views_count_no_bytes() -> None:
    with FakeTensorMode():
        inputs = {name: torch.empty(1, 2, 16, 8, device="meta", requires_grad=True) for name in "qkv"}
        recorded = record_call(attention.apply, inputs, train=True)
    forward = operations(recorded, "forward")
    assert [operation.op for operation in forward if operation.kind == "gemm"] == ["aten.bmm.default"] * 2
    product = forward[0]
    assert product.flops == 2 * 2 * 16 * 16 * 8
    assert [t.storage for t in product.reads] == [recorded.inputs[name].storage for name in "qk"]
    masked = next(operation for operation in forward if operation.op.startswith("aten.masked_fill"))
    # The mask is [sequence, sequence] before broadcasting.
    assert sorted(tensor.bytes for tensor in masked.reads) == [256, 2048]
    assert not any("view" in o.op or "expand" in o.op or "transpose" in o.op or "empty" in o.op for o in forward)


@pytest.mark.parametrize(
    "look_up", [lambda i: i["table"][i["ids"]], lambda i: torch.nn.functional.embedding(i["ids"], i["table"])]
)
def test_a_lookup_reads_as_many_elements_as_it_returns(look_up: Any) -> None:
    inputs = {"table": torch.ones(100, 8), "ids": torch.tensor([3, 3, 7])}
    (found,) = operations(record_call(lambda given: {"y": look_up(given)}, inputs, train=False), "forward")
    used = {recorded.shape: (recorded.bytes, recorded.bytes_used) for recorded in found.reads}
    assert used == {(100, 8): (3200, 96), (3,): (24, 24)}
    assert [(written.bytes, written.bytes_used) for written in found.writes] == [(96, 96)]


def test_in_place_operations_read_the_old_values_unless_they_overwrite_them() -> None:
    x, y = torch.ones(8), torch.ones(8)
    with record_operations() as events:
        x.add_(y)
        x.zero_()
        x.copy_(y)
        x[2:4].fill_(1.0)
        torch.zeros_like(x)
    add, zero, copy, fill, zeros = (event for event in events if isinstance(event, Operation))
    assert (len(add.reads), len(add.writes)) == (2, 1) and add.writes[0].storage == add.reads[0].storage
    assert (zero.kind, zero.reads, zero.writes[0].bytes) == ("memset", (), 32)
    assert (copy.kind, len(copy.reads), copy.reads[0].storage) == ("copy", 1, add.reads[1].storage)
    wide = torch.ones(8, dtype=torch.float64)
    with record_operations() as events:
        x.copy_(wide)
        x.to(torch.float64)
    converts, too = (event for event in events if isinstance(event, Operation))
    assert (converts.kind, converts.flops, too.kind) == ("elementwise", 8, "elementwise")
    assert (copy.flops, len(converts.reads)) == (0, 1)
    assert (fill.writes[0].bytes, fill.writes[0].offset, fill.writes[0].storage) == (8, 2, zero.writes[0].storage)
    assert zeros.reads == ()


def test_checkpointing_repeats_operations_and_a_handwritten_backward_keeps_its_line() -> None:
    class Tripled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 3

        @staticmethod
        def backward(ctx, dy):
            return dy * 3

    x = torch.ones(4, requires_grad=True)
    repeated = record_call(
        lambda inputs: {"y": checkpoint(lambda x: torch.tanh(x * 2), inputs["x"], use_reentrant=False)},
        {"x": x}, train=True,
    )
    assert [(o.op, o.rematerialized) for o in operations(repeated, "backward")] == [
        ("aten.mul.Tensor", True), ("aten.tanh.default", True),
        ("aten.tanh_backward.default", False), ("aten.mul.Tensor", False),
    ]
    written = record_call(lambda inputs: {"y": Tripled.apply(inputs["x"])}, {"x": x}, train=True)
    (forward,), (backward,) = operations(written, "forward"), operations(written, "backward")
    assert backward.backward and not backward.rematerialized
    assert int(backward.line.rpartition(":")[2]) - int(forward.line.rpartition(":")[2]) == 4


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        with stage("double"):
            return 2 * x

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
        with stage("double"):
            return 2 * dy


def test_a_functions_backward_pass_has_the_stages_of_its_application() -> None:
    def apply(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        x = Doubled.apply(inputs["x"])
        with stage("layer"):
            x = Doubled.apply(x)
            with stage("sublayer"):
                return {"y": Doubled.apply(x)}

    applied = torch.autograd.Function.__dict__["apply"]
    recorded = record_call(apply, {"x": torch.randn(3, requires_grad=True)}, train=True)
    assert torch.autograd.Function.__dict__["apply"] is applied
    names = ["double", "layer/double", "layer/sublayer/double"]
    assert [operation.stage for operation in operations(recorded, "forward")] == names
    assert [operation.stage for operation in operations(recorded, "backward")] == names[::-1]


def test_cotangents_are_made_outside_the_recording_and_inference_has_one_phase() -> None:
    x = torch.ones(4, requires_grad=True)
    dy = torch.full((4,), 2.0)
    trained = record_call(lambda inputs: {"y": inputs["x"] * 3}, {"x": x}, train=True, cotangents={"y": dy})
    assert [o.op for o in operations(trained, "backward")] == ["aten.mul.Tensor"]
    assert set(trained.inputs) == {"x", "dy"} and set(trained.outputs) == {"y", "dx"}
    inferred = record_call(lambda inputs: {"y": inputs["x"] * 3}, {"x": x}, train=False)
    assert set(inferred.parts) == {"forward"} and set(inferred.outputs) == {"y"}


def test_stages_nest_during_a_recording_and_do_nothing_otherwise() -> None:
    assert stage("norm") is stage("scale")
    x = torch.ones(4)
    with record_operations() as events:
        with stage("norm"), stage("scale"):
            x * 2
        x + 1
    assert [event.stage for event in events if isinstance(event, Operation)] == ["norm/scale", ""]
    assert not stages.recording()


def test_after_each_is_called_before_the_next_operation() -> None:
    ran: list[str] = []

    class Device(torch.utils._python_dispatch.TorchDispatchMode):
        """A fake GPU that runs a kernel for each operation."""

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            ran.append(function._schema.name.removeprefix("aten::"))
            return function(*args, **(kwargs or {}))

    collected: dict[str, list[list[str]]] = {"forward": [], "backward": []}

    def collect(part: str, index: int) -> None:
        assert index == len(collected[part])
        collected[part].append(list(ran))
        ran.clear()

    x = torch.ones(4, requires_grad=True)
    step = functools.partial(
        record_call, lambda inputs: {"y": (inputs["x"] * 3).exp()}, {"x": x}, train=True, after_each=collect
    )
    with pytest.raises(ValueError, match="needs cotangents"):
        step()
    dy = {"y": torch.ones(4)}
    with Device():
        recorded = step(cotangents=dy)
    for part, kernels in collected.items():
        assert [kernel[-1] for kernel in kernels] == [o.op.split(".")[1] for o in operations(recorded, part)]


def test_a_grouped_product_counts_each_row_with_one_group() -> None:
    """The forward product, and the weights' gradient, whose groups are columns of the first operand."""
    with FakeTensorMode():
        rows, weights = torch.empty(64, 32, dtype=torch.bfloat16), torch.empty(4, 32, 16, dtype=torch.bfloat16)
        ends = torch.empty(4, dtype=torch.int32)

        def call(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            y = torch.nn.functional.grouped_mm(inputs["rows"], inputs["weights"], offs=inputs["ends"])
            return {"d_weights": torch.nn.functional.grouped_mm(inputs["rows"].T, y, offs=inputs["ends"])}

        recorded = record_call(call, {"rows": rows, "weights": weights, "ends": ends}, train=False)
    products = [o for o in operations(recorded, "forward") if "grouped_mm" in o.op]
    assert [(o.kind, o.flops) for o in products] == [("gemm", 2 * 64 * 32 * 16)] * 2


def test_a_product_added_to_a_matrix_of_a_wider_dtype_counts_its_flops() -> None:
    with FakeTensorMode():
        total = torch.zeros(16, 32)

        def call(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            return {"y": torch.addmm(total, inputs["a"], inputs["b"], out_dtype=torch.float32, out=total)}

        given = {"a": torch.empty(16, 64, dtype=torch.bfloat16), "b": torch.empty(64, 32, dtype=torch.bfloat16)}
        (product,) = operations(record_call(call, given, train=False), "forward")
    assert (product.kind, product.flops) == ("gemm", 2 * 16 * 64 * 32)


def test_sdpa_is_attention_and_causal_halves_its_flops() -> None:
    q = torch.randn(1, 2, 16, 8)

    def call(causal: bool) -> Operation:
        recorded = record_call(
            lambda inputs: {"out": torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, q, q, 0.0, causal)[0]},
            {"q": q}, train=False,
        )
        (operation,) = operations(recorded, "forward")
        return operation

    assert call(True).kind == "attention"
    with FakeTensorMode():
        q = torch.empty(1, 2, 16, 8, device="meta")
        flops = []
        for causal in (False, True):
            with record_operations() as events:
                torch.ops.aten._scaled_dot_product_flash_attention(q, q, q, 0.0, causal)
            assert isinstance(events[0], Operation) and events[0].flops is not None
            flops.append(events[0].flops)
        with record_operations() as events:
            torch.ops.aten._flash_attention_forward(
                *[q.transpose(1, 2)] * 3, None, None, 16, 16, 0.0, True, False, window_size_left=4
            )
            torch.ops.aten._efficient_attention_forward(
                *[q.transpose(1, 2)] * 3, None, None, None, 16, 16, 0.0, 1, window_size=4
            )
        assert [e.flops for e in events if isinstance(e, Operation)] == [None, None]  # a window masks more
    assert flops[0] == 2 * 2 * 2 * 16 * 16 * 8 and flops[1] == flops[0] / 2


WITHOUT_A_GPU = """
import json, sys
from xlafuse.triton_side.deviceless import for_target as deviceless
deviceless.activate(json.load(open(sys.argv[1])))
from xlafuse.triton_side.calls.dispatch import record_call
from xlafuse.triton_side.library import swiglu_mlp

shapes = dict(x=(64, 128), norm_weight=(128,), gate_weight=(128, 256), up_weight=(128, 256), down_weight=(256, 128))
with deviceless.fake_mode():
    inputs = deviceless.fake_inputs({n: (s, "bfloat16") for n, s in shapes.items()}, requires_grad=True)
    recorded = record_call(lambda i: swiglu_mlp.apply(i, eps=1e-6), inputs, train=True, compile_only=True)
print(json.dumps({part: [event.op for event in events] for part, events in recorded.parts.items()}))
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++ to build fake_cuda_hooks.cpp")
def test_a_fake_gpu_gets_the_operations_of_a_real_one() -> None:
    root = Path(__file__).parents[3]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
    properties = root / "compare/targets/h200/cuda_device_properties.json"
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_A_GPU, str(properties)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-4000:]
    parts = json.loads(done.stdout.splitlines()[-1])
    assert parts["forward"] == [
        "aten._fused_rms_norm.default", "aten.mm.default", "aten.silu.default", "aten.mm.default", "aten.mul.Tensor",
        "aten.addmm.default",
    ]
    assert len(parts["backward"]) == 12
    assert {"aten.silu_backward.default", "aten._fused_rms_norm_backward.default"} < set(parts["backward"])


def test_operations_of_another_device_are_left_out() -> None:
    with record_operations(device="cuda") as events:
        torch.ones(4) * 2
    assert events == []



def test_a_reused_address_gets_a_new_storage_number() -> None:
    x = torch.ones(1 << 12)
    with record_operations() as events:
        for _ in range(8):
            x * 2
    assert len({event.writes[0].storage for event in events}) == 8
