"""Parts, phases and layers of a step: small graphs, and a captured step of six layers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from commands import xlafuse

from xlafuse.compare.graph.analyse.call_time import known_call_time
from xlafuse.compare.graph.formats import predicted as predicted_words
from xlafuse.compare.graph.model import Access, Buffer, FusionGraph, Kernel, SourceOp
from xlafuse.compare.model.groups import groups
from xlafuse.compare.model.part_changes import changes
from xlafuse.compare.model.parts import layers_of, parts, pieces
from xlafuse.compare.model.phases import step_phases
from xlafuse.compare.model.places import Sources
from xlafuse.compare.model.precision import precision_of_products
from xlafuse.compare.model.step import Step, step_of
from xlafuse.compare.sources.opening import open_source


def kernel(name: str, reads: str, writes: str, *ops: SourceOp, time: float = 1.0, kind: str = "elementwise") -> Kernel:
    """A kernel that reads and writes buffers of one letter each."""
    return Kernel(
        name, kind, source_ops=ops, device_time_us=time, flops=10.0,  # type: ignore[arg-type]
        inputs=tuple(Access(b, 4) for b in reads), outputs=tuple(Access(b, 4) for b in writes),
    )


def graph(*kernels: Kernel) -> FusionGraph:
    names = sorted({access.buffer for k in kernels for access in (*(k.inputs or ()), *(k.outputs or ()))})
    return FusionGraph("step", "xla", kernels, tuple(Buffer(n, (1,), "f32", 4, "intermediate") for n in names))


def op(
    name: str, place: str = "", *, stage: str = "", site: str = "", backward: bool = False, again: bool = False
) -> SourceOp:
    return SourceOp(name, stage, "", site, backward, again, place)


def test_what_depends_on_a_gradient_and_is_none_updates_the_model() -> None:
    step = graph(
        kernel("forward", "x", "y", op("mul")), kernel("again", "x", "z", op("mul", again=True)),
        kernel("gradient", "yz", "g", op("mul", backward=True)), kernel("adam", "g", "p", op("sqrt")),
        kernel("norm", "p", "n", op("add")), kernel("loss", "y", "l", op("log")),
    )
    assert step_phases(step) == ["forward", "recompute", "backward", "update", "update", "forward"]


def test_what_fusion_computes_again_and_what_reads_a_gradient_is_no_recomputation() -> None:
    """The gradient's kernel computes the loss again; the last one has checkpointed operations within a gradient."""
    loss = kernel("loss", "x", "l", op("exp", site="exp@1"), op("log", site="log@1"))
    gradient = kernel(
        "gradient", "x", "g", op("exp", site="exp@1"), op("log", site="log@1"), op("sub", site="sub@2", backward=True)
    )
    silu = kernel("silu", "gx", "h", op("logistic", again=True, site="r@3"), op("mul", again=True, site="r@4"))
    assert step_phases(graph(loss, gradient, silu)) == ["forward", "backward", "backward"]


def test_most_of_the_work_decides_the_part_and_the_phase() -> None:
    """A product outweighs what is fused into it; operations that move data count least."""
    ops = op("mul", "a.py:1 f"), op("add", "a.py:1 f"), op("dot_general", "a.py:2 f", backward=True)
    product = kernel("gemm", "x", "y", *ops, kind="gemm")
    moves = kernel("fusion", "x", "z", *[op("transpose", "a.py:3 f")] * 3, op("exp", "a.py:4 f", again=True))
    first, second = pieces({"step": graph(product, moves)})
    assert (first.key, first.phase, first.others) == ("a.py:2 f", "backward", ("a.py:1 f",))
    assert (second.key, second.phase, second.others) == ("a.py:4 f", "recompute", ("a.py:3 f",))


def test_a_kernel_without_a_part_takes_that_of_its_reader_then_of_its_writer() -> None:
    found = pieces({"step": graph(
        kernel("made", "x", "a", op("mul", "a.py:1 f")), kernel("copy", "a", "b", op("copy")),
        kernel("again", "b", "c"), kernel("read", "c", "d", op("exp", "a.py:2 f")), kernel("last", "d", "e"),
    )})
    assert [piece.key for piece in found] == ["a.py:1 f", "a.py:2 f", "a.py:2 f", "a.py:2 f", "a.py:2 f"]
    assert [piece.key for piece in pieces({"step": graph(kernel("alone", "x", "y"))})] == [""]


def test_layers_of_one_scope_are_one_part() -> None:
    scopes = [f"layers_{number}/norm" for number in range(4)]
    ops = [op("mul", "nn.py:3 f", stage=scope, site=f"jit(f)/{scope}/mul@nn.py:3#1") for scope in scopes]
    found = parts(pieces({"step": graph(*(kernel(f"k{n}", "x", "y", one) for n, one in enumerate(ops)))}))
    assert [(part.key, part.layers, len(part.pieces)) for part in found] == [("layers_*/norm", 4, 4)]


def test_a_loop_over_layers_counts_its_rounds() -> None:
    """A scan's body is compiled once, and its kernels run once a layer."""
    body = kernel("k", "x", "y", op("exp", "nn.py:3 f", stage="Block_0/attend", site="while/body/Block_0/attend/exp@1"))
    (part,) = parts(pieces({"step": graph(replace(body, launches=12))}))
    assert part.layers == 12


def test_times_and_flops_add_up_and_a_recomputation_is_no_work_of_the_model() -> None:
    found = parts(pieces({"step": graph(
        kernel("a", "x", "y", op("mul", "a.py:1 f"), time=5.0),
        kernel("b", "y", "z", op("mul", "a.py:1 f", again=True), time=3.0),
        kernel("c", "z", "w", op("mul", "a.py:2 f"), time=1.0),
    )}))
    assert [(part.time_us, len(part.pieces)) for part in found] == [(8.0, 2), (1.0, 1)]


def test_short_parts_of_a_function_are_one_group_and_a_long_one_stands_alone() -> None:
    def part(place: str, time: float) -> Kernel:
        return kernel(place, "x", "y", op("mul", place), time=time)

    found = groups(parts(pieces({"step": graph(
        part("a.py:8:20-40 Layer.__call__", 60.0), part("a.py:8:10-50 Layer.__call__", 2.0),
        part("a.py:7:10-30 Layer.__call__", 1.5), part("a.py:9:10-50 Layer.__call__", 12.0),
        part("a.py:9:20-30 Layer.__call__", 20.0), part("a.py:12:1-5 Model.__call__", 3.0),
    )})), Sources())
    shown = [[part.key.split()[0].removeprefix("a.py:") for part in group.parts] for group in found]
    assert shown == [["8:20-40"], ["9:20-30", "9:10-50"], ["8:10-50", "7:10-30"], ["12:1-5"]]


@pytest.fixture(scope="module")
def step(nnx: Path) -> Step:
    return step_of(open_source(nnx))


def test_the_captured_steps_time_is_of_the_users_calls(step: Step) -> None:
    """By another program's count, attention takes 17.3 of 33.6 ms: 4.5 forward, 4.7 recomputed, 8.2 backward."""
    attention = step.parts[0]
    assert step.name(attention) == "jax.nn.dot_product_attention" and attention.layers == layers_of(step.parts) == 6
    assert attention.time_us == pytest.approx(17.3e3, rel=0.03) and step.time_us == pytest.approx(33.6e3, rel=0.01)
    assert sum(step.by_phase.values()) == pytest.approx(step.time_us)
    assert sum(part.time_us for part in step.parts if not part.key) < 0.01 * step.time_us


def test_the_captured_steps_groups_hold_all_of_it(step: Step) -> None:
    named = {step.name(group.parts[0]): group for group in step.groups}
    assert sum(group.time_us for group in step.groups) == pytest.approx(step.time_us)
    assert len(step.groups) <= 10
    assert named["s.h"].time_us == pytest.approx(2.1e3, rel=0.03)  # the head, with its norm
    assert named["opt.update"].time_us == pytest.approx(1.09e3, rel=0.03)
    update = named["opt.update"].pieces
    assert sum(piece.time_us for piece in update if piece.phase == "update") > 0.98 * named["opt.update"].time_us


def test_the_first_screen_is_a_dozen_lines_and_the_view_lists_every_part(nnx: Path, step: Step) -> None:
    done = xlafuse("inspect", nnx)
    before, _, _ = done.output.partition(str(nnx))
    assert "34.1 ms" in before and "202 TFLOP/s" in before and "20% of" in before  # 6 N T plus half a square: 201
    assert done.exit_code == 0 and "nn.dot_product_attention" in before and "train_nnx.py:8" in before
    assert "idle 757" in before and "nnx.remat" in before and "leave as they are" in before
    assert len(before.splitlines()) <= 32  # of 80 columns
    shown = json.loads(xlafuse("inspect", nnx, "--json").stdout)["step"]
    assert shown["layers"] == 6 and shown["parts"][0]["where"] == shown["remedies"][0]["where"] == "train_nnx.py:8"
    table = xlafuse("inspect", nnx, "--view", "parts")
    assert table.exit_code == 0 and all(step.name(part)[:30] in table.output for part in step.parts)


def test_a_graph_without_times_has_parts(nnx: Path) -> None:
    (module,) = (nnx / "xla").glob("*.hlo.pb")
    done = xlafuse("inspect", module, "--view", "parts")
    assert done.exit_code == 0 and "Layer.__call__" in done.output


def test_a_captured_step_of_torch_has_the_optimizer_and_the_modules_functions(gpt: Path) -> None:
    """Without columns, each function of the program is a line. Work outside of compiled graphs has a part, too."""
    step = step_of(open_source(gpt))
    shares = {step.names(group)[0]: group.time_us / step.time_us for group in step.groups}
    assert list(shares)[:4] == ["Attention.forward", "Gpt.forward", "Mlp.forward", "AdamW.step"]
    assert shares["Attention.forward"] == pytest.approx(0.45, abs=0.02) and step.layers == 6
    assert shares["AdamW.step"] + shares["clip_grad_norm_"] == pytest.approx(0.127, abs=0.01)
    assert step.by_phase["update"] == pytest.approx(2.21e3, rel=0.02)
    assert sum(part.time_us for part in step.parts if not part.key) < 0.02 * step.time_us


def test_a_library_call_with_several_results_has_a_part_in_both_phases(captures: Path) -> None:
    """SDPA with dropout is cuDNN's kernels and one that unpacks the seed; Inductor names no node of its backward."""
    step = step_of(open_source(captures / "gpt_sdpa"))
    assert all(part.key for part in step.parts if part.time_us > 0.005 * step.time_us)
    kernels = [piece for piece in step.pieces if piece.kernel.kind == "attention"]
    assert [piece.phase for piece in kernels] == ["forward"] * 6 + ["backward"] * 6
    assert all("train_gpt_sdpa.py" in piece.key and piece.time_us > 100 for piece in kernels)
    array = 8 * 12 * 1024 * 64 * 2
    for piece in kernels:
        written = array + 8 * 12 * 1024 * 4 + 16 if piece.phase == "forward" else 3 * array
        assert piece.kernel.bytes_written == written


def test_the_line_of_a_package_is_shown_as_the_users(nnx: Path) -> None:
    """flax's linear.py:422 is on every product of the decoder; its author wrote s.qkv(...) on line 7."""
    step = step_of(open_source(nnx))
    kernels = [piece.kernel for piece in step.pieces if piece.key]
    assert any("site-packages" in op.line for kernel in kernels for op in kernel.source_ops)
    assert {line.partition(":")[0] for kernel in kernels for line in kernel.lines} == {"train_nnx.py"}


def test_the_wait_between_two_steps_is_split_where_the_host_calls_the_program(captures: Path, gpt: Path) -> None:
    step = step_of(open_source(captures / "nnx"))
    assert step.program == "step" and step.wait_us == pytest.approx(12.6e3, rel=0.01)
    assert step.before_call_us == pytest.approx(6.65e3, rel=0.01)
    assert step_of(open_source(gpt)).before_call_us == 0


def test_two_steps_are_compared_by_parts(nnx: Path, gpt: Path) -> None:
    step, other = step_of(open_source(nnx)), step_of(open_source(gpt))
    assert all(change.lost_us == 0 for change in changes(step, step))
    found = changes(step, other)
    assert sum(change.lost_us for change in found) == pytest.approx(other.time_us - step.time_us)
    lost = [abs(change.lost_us) for change in found]
    assert lost == sorted(lost, reverse=True) and found[0].after_us is None
    assert (found[0].name, found[0].where) == ("jax.nn.dot_product_attention", "train_nnx.py:8")


def test_one_argument_is_seen_as_the_change_of_one_part(captures: Path) -> None:
    """The step of 34.1 ms takes 18.1 with cuDNN's attention."""
    before, after = (step_of(open_source(captures / name)) for name in ("nnx", "nnx_cudnn"))
    first, *others = changes(before, after)
    assert (first.name, first.where) == ("jax.nn.dot_product_attention", "train_nnx_cudnn.py:8")
    assert first.before_us == pytest.approx(17.58e3, rel=0.01) and first.after_us == pytest.approx(1.82e3, rel=0.01)
    assert max(abs(change.lost_us) for change in others) < 0.01 * before.time_us
    assert (before.device_us, after.device_us) == (pytest.approx(34.13e3, rel=0.01), pytest.approx(18.14e3, rel=0.01))


def test_a_dump_has_predicted_times_of_parts_and_phases_and_no_measured_ones(compiled: Path) -> None:
    done = xlafuse("inspect", compiled, "--view", "parts", "--json")
    rows = json.loads(done.stdout)["rows"]
    phases = ("forward", "recompute", "backward", "update")
    assert all(row["device_time_us"] is None and not any(row[f"{phase}_us"] for phase in phases) for row in rows)
    for row in rows:
        of_phases = sum(row[f"predicted_{phase}_us"] or 0.0 for phase in phases)
        assert row["predicted_low_us"] < row["predicted_time_us"] < row["predicted_high_us"]
        assert row["predicted_time_us"] == pytest.approx(of_phases)
    unknown = sum(row["unpredicted"] or 0 for row in rows)
    total = sum(row["predicted_time_us"] for row in rows)
    assert 0 < unknown < 5 and total == pytest.approx(33.6e3, rel=0.2)  # its kernels' measured times
    time, missing = known_call_time(next(iter(step_of(open_source(compiled)).graphs.values())))
    assert time.us is not None and missing == unknown and total < time.us < 1.05 * total
    text = xlafuse("inspect", compiled, "--view", "parts").stdout
    assert f"at least {predicted_words(time)} ({unknown} not predicted)" in text


def test_parts_of_a_graph_for_an_unknown_gpu_say_why_they_have_no_times(nnx: Path) -> None:
    text = xlafuse("inspect", nnx / "xla", "--view", "parts").stdout
    assert "~" not in text and "does not say its GPU" in text


@pytest.mark.parametrize(("name", "largest"), [
    ("bert", ["BertOutput.forward", "BertIntermediate.forward", "BertLMPredictionHead.forward"]),
    ("olmoe_grouped", ["AdamW.step", "_grouped_mm", "sdpa_attention_forward"]),
])
def test_models_of_libraries_have_parts(captures: Path, name: str, largest: list[str]) -> None:
    """Hugging Face's BERT and OLMoE: the program's own lines only call them."""
    step = step_of(open_source(captures / name))
    assert sum(part.time_us for part in step.parts if part.key) > 0.95 * step.time_us
    assert [step.name(group.parts[0]) for group in step.groups][:3] == largest


@pytest.mark.parametrize(("name", "precision"), [("bert", "float32-ieee"), ("gpt", "bfloat16"), ("nnx", "bfloat16")])
def test_the_precision_is_that_of_most_products(captures: Path, name: str, precision: str) -> None:
    assert precision_of_products(step_of(open_source(captures / name)).pieces) == precision
