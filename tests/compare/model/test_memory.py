"""Memory of a step by launches and parts, what checkpointing costs and saves, and the model's own work."""

from __future__ import annotations

import statistics
from dataclasses import replace
from pathlib import Path

import pytest

from xlafuse.compare.graph.model import Access, Buffer, FusionGraph, Kernel, Role
from xlafuse.compare.model.checkpoint import checkpoint, freed_bytes
from xlafuse.compare.model.memory import memory
from xlafuse.compare.model.step import Step, step_of
from xlafuse.compare.model.used_blocks import used_blocks
from xlafuse.compare.model.work import model_flops
from xlafuse.compare.sources.opening import open_source

ROOT = Path(__file__).parents[3]


def graph(*launches: str, sizes: str = "", roles: str = "") -> FusionGraph:
    """A graph of launches such as "x w -> y". sizes: "y=4", by default 1. roles: "x=input", by default intermediate."""
    kernels = []
    for number, launch in enumerate(launches):
        read, written = (tuple(Access(name, 1) for name in side.split()) for side in launch.split("->"))
        kernels.append(Kernel(f"k{number}", "elementwise", inputs=read, outputs=written))
    of_size, of_role = (dict(item.split("=") for item in text.split()) for text in (sizes, roles))
    names = dict.fromkeys(access.buffer for kernel in kernels for access in (*kernel.inputs, *kernel.outputs))
    buffers = (Buffer(name, (1,), "f32", int(of_size.get(name, 1)), _role(of_role.get(name))) for name in names)
    return FusionGraph("step", "xla", tuple(kernels), tuple(buffers))


def _role(name: str | None) -> Role:
    return name or "intermediate"  # type: ignore[return-value]


def test_a_buffer_takes_memory_from_its_writer_to_its_last_reader() -> None:
    program = graph("x -> a", "a -> b", "b -> c", "a c -> y", sizes="x=100 a=8 b=4 c=2 y=50", roles="x=input y=output")
    found = memory(program, ["first", "second", "third", "last"])
    assert (found.arguments, found.results, found.kernel) == (100, 50, 2)
    assert found.between == {"first": 8, "second": 4, "third": 2} and found.bytes == 164


def test_a_kernel_writes_to_the_memory_of_an_operand_that_nothing_reads_later() -> None:
    in_place = memory(graph("x -> a", "a -> b", "b -> c", sizes="a=8 b=8 c=8", roles="x=input"), ["p", "q", "r"])
    assert sum(in_place.between.values()) == 8
    read_later = memory(graph("x -> a", "a -> b", "a b -> c", sizes="a=8 b=8 c=1", roles="x=input"), ["p", "q", "r"])
    assert sum(read_later.between.values()) == 17
    smaller = memory(graph("x -> a", "a -> b", sizes="a=8 b=7", roles="x=input"), ["p", "q"])
    assert sum(smaller.between.values()) == 15


def test_buffers_of_a_change_go_or_come_earlier() -> None:
    program = graph("x -> a", "x -> b", "b -> c", "a c -> y", sizes="a=8 b=4 c=2", roles="x=input y=output")
    keys = ["p"] * 4
    assert memory(program, keys, without=["b"]).bytes == memory(program, keys).bytes - 4
    again = graph("x -> a", "a -> y", "x -> b", "b -> z", sizes="a=8 b=4", roles="x=input y=output z=output")
    assert memory(again, keys, early=["b"], since=0).bytes == memory(again, keys).bytes + 4


def test_other_memories_and_buffers_of_the_whole_call_are_not_between_kernels() -> None:
    program = graph("x -> a", "a -> y", sizes="x=5 a=8 y=3", roles="x=input y=output")
    host = replace(program, buffers=tuple(replace(b, space="host") if b.name == "a" else b for b in program.buffers))
    assert memory(host, ["p", "q"]).bytes == 8 and not memory(host, ["p", "q"]).between
    assert memory(FusionGraph("empty", "xla", ()), []).bytes == 0


@pytest.mark.full
def test_memory_is_what_xla_plans() -> None:
    """The docstring of `memory` states these numbers, of the committed run on an H200."""
    ratios = []
    for result in open_source(ROOT / "reports" / "h200").results:
        graph = result.graph
        if graph is None or not graph.kernels or result.record is None or result.record.measurement is None:
            continue
        for phase, peak in (result.record.measurement.peak_memory or {}).items():
            if peak.planned:
                ratios.append(_of_phase(graph, phase) / peak.planned)
    ratios.sort()
    assert len(ratios) > 600 and statistics.median(ratios) == pytest.approx(1.0, abs=0.01)
    tenth = len(ratios) // 10
    assert ratios[tenth] == pytest.approx(0.84, abs=0.02) and ratios[-tenth] == pytest.approx(1.16, abs=0.03)


def _of_phase(graph: FusionGraph, phase: str) -> int:
    """Return results and buffers between kernels of a phase, in which residuals are results of forward."""
    kernels = tuple(kernel for kernel in graph.kernels or () if kernel.phase == phase)
    written = {access.buffer for kernel in kernels for access in kernel.outputs or ()}
    buffers = tuple(
        replace(buffer, role="output" if buffer.role == "saved" and phase == "forward" else buffer.role)
        for buffer in graph.buffers if buffer.name in written
    )
    found = memory(replace(graph, kernels=kernels, buffers=buffers), [""] * len(kernels))
    return found.results + sum(found.between.values())


@pytest.fixture(scope="module")
def step(nnx: Path) -> Step:
    return step_of(open_source(nnx))


def test_the_captured_steps_memory_is_what_xla_planned(step: Step) -> None:
    """The dump's buffer assignment: 1.995 GB of arguments, 1.995 of results, 1.655 of temporary buffers."""
    found = step.memory[step.largest]
    assert found.bytes == pytest.approx(5.644e9, rel=0.05)
    assert step.at_the_peak == found.between and next(iter(found.between)).startswith("train_nnx.py:18")


DONATING = """HloModule m, is_scheduled=true, input_output_alias={ {0}: (0, {}, may-alias) }

%f (p: f32[1024]) -> f32[1024] {
  %p = f32[1024]{0} parameter(0)
  ROOT %n = f32[1024]{0} negate(%p)
}

ENTRY %main (x: f32[1024], y: f32[256]) -> f32[1024] {
  %y = f32[256]{0} parameter(1)
  %x = f32[1024]{0} parameter(0)
  ROOT %k = f32[1024]{0} fusion(%x), kind=kLoop, calls=%f
}
"""


@pytest.mark.parametrize(("text", "donated"), [(DONATING, 4096), (DONATING.replace("input_output_alias", "other"), 0)])
def test_a_result_in_the_memory_of_a_donated_argument_counts_once(tmp_path: Path, text: str, donated: int) -> None:
    (tmp_path / "m.txt").write_text(text)
    step = step_of(open_source(tmp_path / "m.txt"))
    assert step.donated(step.largest) == donated and step.memory[step.largest].bytes == 2 * 4096 + 1024 - donated


def test_an_update_whose_arguments_are_not_donated_could_save_their_memory(step: Step, gpt: Path) -> None:
    """Parameters of 166,212,608 elements and AdamW's moments, in float32; PyTorch updates in place."""
    assert step.donatable_bytes == pytest.approx(3 * 4 * 166_212_608, rel=0.01)
    assert step_of(open_source(gpt)).donatable_bytes == 0


def test_checkpointing_has_its_call_its_time_and_its_memory(step: Step) -> None:
    """By another program's count, the step computes 7.4 ms again: 4.7 of attention, 2.7 of the rest."""
    found = checkpoint(step, ())
    assert found is not None and (found.name, found.place.split(":")[:2]) == ("nnx.remat", ["train_nnx.py", "13"])
    assert found.time_us == pytest.approx(step.by_phase["recompute"]) == pytest.approx(7.4e3, rel=0.02)
    attention = next(used for used in used_blocks(step) if used.block == "attention")
    rest = checkpoint(step, attention.pieces)
    assert rest is not None and rest.time_us == pytest.approx(found.time_us - 4.83e3, rel=0.01)
    # A layer keeps 2 x (norm, attention, projection), 3 of q, k and v, and 3 of the MLP's width of four.
    tokens, width = 8 * 1024, 1024
    assert rest.memory_bytes == pytest.approx(6 * 2 * tokens * width * (2 * 3 + 3 + 3 * 4), rel=0.15)
    assert found.memory_bytes > 3 * rest.memory_bytes  # with all scores


def test_a_step_without_checkpointing_has_none(gpt: Path) -> None:
    assert checkpoint(step_of(open_source(gpt)), ()) is None


def test_one_kernel_for_attention_frees_the_scores(gpt: Path) -> None:
    """Six layers keep 8 x 12 x 1024 x 1024 probabilities and their mask of dropout."""
    step = step_of(open_source(gpt))
    attention = next(used for used in used_blocks(step) if used.block == "attention")
    scores = 6 * 8 * 12 * 1024 * 1024
    assert 3 * scores < freed_bytes(step, attention.pieces) < 6 * scores
    assert freed_bytes(step, ()) == 0


def test_the_models_work_is_known_where_libraries_hide_theirs(captures: Path) -> None:
    """6 FLOPs a parameter and token; attention, causal or not, 3 x 4 a query, key and feature."""
    tokens, pairs = 8 * 1024, 8 * 1024 * 1024 * 6
    decoder = 6 * tokens * (6 * 16 * 1024**2 + 32000 * 1024) + 12 * pairs * 1024 / 2
    gpt = 6 * tokens * (6 * 12 * 768**2 + 50304 * 768) + 12 * pairs * 768
    for name, work in (("nnx", decoder), ("nnx_cudnn", decoder), ("gpt", gpt)):
        step = step_of(open_source(captures / name))
        assert model_flops(step, used_blocks(step)) == pytest.approx(work, rel=0.02), name
