"""XLA's verdicts as reasons of a fusion graph, what the missed fusions would save, and their order."""

import dataclasses
import re
from collections import Counter
from pathlib import Path

import pytest

from xlafuse.compare.graph.analyse.missed_fusions import ranked
from xlafuse.compare.graph.analyse.roofline import Ceilings
from xlafuse.compare.graph.build.from_hlo import from_hlo
from xlafuse.compare.graph.build.kernel_edges import KernelEdge, barrier, barrier_code, bytes_saved, kernel_edges
from xlafuse.compare.graph.build.xla_reasons import PHRASES, code_of, reasons
from xlafuse.compare.graph.model import REASONS, Access, Buffer, FusionGraph, Kernel, Kind, Reason, Role
from xlafuse.dumps import dump_folder
from xlafuse.hlo import file_reader
from xlafuse.reasons import fusion_decisions
from xlafuse.reasons.fusion_decisions import FusionDecision

DATA = Path(__file__).parents[3] / "data" / "xla_reasons"


def graphs(source: Path) -> list[tuple[FusionGraph, list[FusionDecision]]]:
    found = []
    for module in dump_folder.modules(source):
        file = module.artifacts.find("hlo")
        assert file is not None
        with file.local() as path:
            graph = from_hlo(file_reader.read(path))
        raw = fusion_decisions.read_decisions(module.artifacts)
        found.append((dataclasses.replace(graph, reasons=reasons(graph, raw)), raw))
    return found


def by_pair(graph: FusionGraph) -> dict[tuple[str, str], Reason]:
    return {(reason.producer, reason.consumer): reason for reason in graph.reasons}


# A graph by hand: a -> x -> b, c; b -> y -> c; c returns z


def kernel(name: str, reads: dict[str, int], writes: dict[str, int], kind: Kind = "elementwise") -> Kernel:
    accesses = [tuple(Access(buffer, size) for buffer, size in side.items()) for side in (reads, writes)]
    return Kernel(name, kind, inputs=accesses[0], outputs=accesses[1])


def graph(*kernels: Kernel, **roles: Role) -> FusionGraph:
    names = {access.buffer for each in kernels for access in (*(each.inputs or ()), *(each.outputs or ()))}
    buffers = [Buffer(name, (25,), "f32", 100, roles.get(name, "intermediate")) for name in sorted(names)]
    return FusionGraph("f", "xla", kernels, tuple(buffers))


A = kernel("a", {"i": 100}, {"x": 100})
B = kernel("b", {"x": 100}, {"y": 100})
C = kernel("c", {"x": 40, "y": 100}, {"z": 100})
CHAIN = graph(A, B, C, i="input", z="output")


def test_edges_connect_writers_and_readers() -> None:
    assert kernel_edges(CHAIN) == [KernelEdge(0, 1, ("x",)), KernelEdge(0, 2, ("x",)), KernelEdge(1, 2, ("y",))]


def test_a_buffer_written_twice_comes_from_its_last_writer() -> None:
    again = kernel("again", {"y": 100}, {"x": 100})
    assert kernel_edges(graph(A, B, again, C))[-2:] == [KernelEdge(1, 3, ("y",)), KernelEdge(2, 3, ("x",))]


def test_there_is_no_edge_between_forward_and_backward() -> None:
    backward = dataclasses.replace(B, phase="backward")
    assert kernel_edges(graph(A, backward)) == []


def test_fusing_saves_private_writes_and_shared_reads() -> None:
    """A private buffer counts its write, too; a slice counts its own bytes; each launch counts."""
    shared, sliced, private = (bytes_saved(CHAIN, edge) for edge in kernel_edges(CHAIN))
    assert (shared, sliced, private) == (100, 40, 200)
    returned = graph(A, B, i="input", x="output")
    assert bytes_saved(returned, KernelEdge(0, 1, ("x",))) == 100
    looped = graph(*(dataclasses.replace(each, launches=6) for each in (A, B)), i="input")
    assert bytes_saved(looped, KernelEdge(0, 1, ("x",))) == 6 * 200
    unknown = graph(dataclasses.replace(A, launches=None), B)
    assert bytes_saved(unknown, KernelEdge(0, 1, ("x",))) is None


def test_products_and_library_calls_are_barriers_of_any_compiler() -> None:
    product, attention = dataclasses.replace(A, kind="gemm"), dataclasses.replace(C, kind="attention")
    g = graph(product, B, attention)
    found = [reason for edge in kernel_edges(g) if (reason := barrier(g, edge)) is not None]
    assert [(r.producer, r.consumer, r.code, r.origin) for r in found] == [
        ("a", "b", "gemm", "inferred"), ("a", "c", "gemm", "inferred"), ("b", "c", "library", "inferred"),
    ]
    assert not any(barrier(CHAIN, edge) for edge in kernel_edges(CHAIN)) and barrier_code(B) is None


# XLA's words


def decision(producer: str, consumer: str, text: str, **other: object) -> FusionDecision:
    given = {"log_producer": producer, "log_consumer": consumer} | other
    return FusionDecision(producer, consumer, text, given.pop("fusion_pass", "priority-fusion"), **given)  # type: ignore


def test_a_decision_about_the_pair_comes_first() -> None:
    raw = [
        decision("a", "b", "the consumer is not fusible", barrier="output", refused_by="tuple.1"),
        decision("a", "b", "different loop shapes", fusion_pass="multi_output_fusion"),
        decision("a", "c", "us_fused: 3.0 us_unfused: 2.0", fused_us=3.0, unfused_us=2.0),
        decision("b", "c", "the consumer is not fusible", barrier="output", refused_by="tuple.1"),
        decision("", "", "both the producer and the consumer contain a reduce", log_producer="gone"),
    ]
    shape, slower, shared, lost = reasons(CHAIN, raw)
    assert (shape.code, shape.origin) == ("shape", "xla multi_output_fusion")
    assert shape.text == (
        "different loop shapes; priority-fusion: the consumer is not fusible [said of the output, tuple.1]"
    )
    assert (slower.code, slower.fused_us, slower.unfused_us) == ("unprofitable", 3.0, 2.0)
    assert (shared.code, shared.bytes_saved) == ("recompute", 200)
    assert (lost.producer, lost.consumer, lost.code) == ("", "", "reduction")


def test_not_fusible_gets_its_code_from_the_refused_kernel() -> None:
    product = graph(A, dataclasses.replace(B, kind="gemm"), C)
    said = "the consumer is not fusible"
    raw = [
        decision("a", "b", said, barrier="gemm"),
        decision("a", "c", said, barrier="gemm", refused_by="b"),
        decision("b", "c", "the producer is not fusible", barrier="gemm"),
    ]
    direct, other, producer = reasons(product, raw)
    assert (direct.code, other.code, producer.code) == ("gemm", "recompute", "gemm")
    assert other.text == "the consumer is not fusible [said of the matrix product b]"
    assert direct.text == said


def test_a_fence_is_an_order() -> None:
    fenced = decision("a", "b", "not fusing because there are only bitcast users", barrier="order", log_consumer="")
    assert reasons(graph(A, B), [fenced])[0].code == "order"


def test_a_value_that_leaves_its_computation() -> None:
    leaving = decision("a", "", "the consumer is not fusible", barrier="output", refused_by="tuple.1")
    (reason,) = reasons(graph(A, B), [leaving])
    assert (reason.producer, reason.consumer, reason.code) == ("a", "b", "unsupported")


def test_an_edge_without_a_decision_is_inferred() -> None:
    (reason,) = reasons(graph(A, B), [])
    assert (reason.code, reason.origin) == ("other", "inferred") and "not kept" in reason.text
    copy = dataclasses.replace(B, kind="copy", facts={"opcode": "copy"})
    (reason,) = reasons(graph(A, copy), [decision("x", "y", "different loop shapes")])
    assert (reason.code, reason.origin) == ("order", "inferred")


def test_a_computation_that_runs_twice_has_one_decision() -> None:
    twice = graph(A, B, dataclasses.replace(A, name="a~2"), dataclasses.replace(B, name="b~2"))
    assert {r.code for r in reasons(twice, [decision("a", "b", "different loop shapes")])} == {"shape"}


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("fusion into output of a reduce fusion would create a loop fusion", "reduction"),
        ("both the producer and the consumer contain a reduce", "reduction"),
        ("tiled reductions with different shapes", "shape"),
        ("multi-output fusion of a transpose and a reduction", "layout"),
        ("producer is physically transposing", "layout"),
        ("slices are non-overlapping", "no-shared-data"),
        ("fusion.37 would introduce a cycle when fused", "order"),
        ("fusion.40 and fusion.38 are connected", "order"),
        ("can't fuse multiple DUSs", "order"),
        ("The consumer is an in-place operation that has an additional operand that has the same value", "order"),
        ("will generate too large IR", "resources"),
        ("shared memory usage would be over the budget of 49152B", "resources"),
        ("over 8 unnested reductions in fusion", "resources"),
        ("Number of operands and output buffers is larger than allowed budget per fusion", "resources"),
        ("the fusion would result in an overly large code duplication", "resources"),
        ("will execute slower if fused", "unprofitable"),
        ("Fusion can not be tiled with SymbolicTileAnalysis: Bailing out on %pad.5.1 = f16[3]", "unsupported"),
        ("not fusing into a single bitcast as consumer", "unsupported"),
        ("not fusing into the output of the root instruction", "recompute"),
        ("something new", "other"),
    ],
)
def test_phrases(text: str, code: str) -> None:
    assert code_of(text) == code


def test_every_code_is_known_to_the_model() -> None:
    assert {code for _, code in PHRASES} <= REASONS.keys()


# Captured compiles


@pytest.mark.parametrize("folder", sorted(DATA.glob("jax-*/*")), ids=lambda folder: "/".join(folder.parts[-2:]))
def test_every_edge_has_its_reason(folder: Path) -> None:
    ((graph, _),) = graphs(folder)
    assert graph.kernels is not None
    pairs = [(graph.kernels[e.producer].name, graph.kernels[e.consumer].name) for e in kernel_edges(graph)]
    assert [(reason.producer, reason.consumer) for reason in graph.reasons] == pairs
    assert "other" not in {reason.code for reason in graph.reasons}
    assert all(reason.bytes_saved for reason in graph.reasons)


def test_every_edge_of_the_h200s_records_has_its_reason(artifacts: Path) -> None:
    """XLA speaks on 95 of 103 edges; the others lead from a GEMM's prologue, split off by the autotuner, into it."""
    codes: Counter[tuple[str, bool]] = Counter()
    for archive in sorted(artifacts.glob("*-xla*.zip")):
        if "unfused" not in archive.name:
            for graph, _ in graphs(archive):
                assert len(graph.reasons) == len(kernel_edges(graph))  # a reason for each, and nothing left over
                assert all(reason.producer and reason.consumer for reason in graph.reasons)
                codes.update((reason.code, reason.origin == "inferred") for reason in graph.reasons)
    assert codes == {
        ("gemm", False): 47, ("gemm", True): 8, ("library", False): 12, ("recompute", False): 10,
        ("reduction", False): 13, ("unprofitable", False): 13,
    }


def test_the_mlps_five_fusions_worth_having(artifacts: Path) -> None:
    archive = artifacts / "swiglu_mlp-llama-8b-bf16-train-xla.zip"
    forward = next(graph for graph, _ in graphs(archive) if graph.name == "jit_forward")
    first, *_ = priced = ranked(forward, Ceilings({0.5: 4e12}, {}, launch_us=1.0))
    gate = 2048 * 14336 * 2
    assert first.reason.code == "gemm" and first.price.us == pytest.approx(gate / 4e12 * 1e6 + 1.0)
    times = [one.price.us or 0.0 for one in priced]
    assert times == sorted(times, reverse=True)


def test_every_reason_is_documented() -> None:
    page = (Path(__file__).parents[4] / "docs" / "fusion-graph.md").read_text()
    table = dict(re.findall(r"^\| `([a-z-]+)` \| (.*) \|$", page, re.MULTILINE))
    assert {code: table.get(code) for code in REASONS} == REASONS
