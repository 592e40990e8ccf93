"""Prices of missed fusions: vanished intermediates, repeated reads and launches, each counted once."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from graph_builder import graph, kernel

from xlafuse.compare.graph.analyse.missed_fusions import MissedFusion, folded, ranked, together
from xlafuse.compare.graph.analyse.roofline import Ceilings
from xlafuse.compare.graph.build.kernel_edges import bytes_saved, kernel_edges
from xlafuse.compare.graph.model import Access, FusionGraph, Kernel, Reason
from xlafuse.compare.sources.opening import open_source
from xlafuse.compare.sources.target_ceilings import target_ceilings

# A copy moves 1 kB/µs, so a buffer of 1000 float32 takes 4 µs. An empty kernel takes 0.5 µs.
CEILINGS = Ceilings({0.5: 1e9}, {}, launch_us=0.5)
BUFFER = 4000
RUNS = Path(__file__).parents[3] / "data" / "runs"


def step(name: str, inputs: str, outputs: str, **more: object) -> Kernel:
    return kernel(name, "elementwise", f"s:{name}@1", inputs, outputs, **more)


def unfused(found: FusionGraph, *pairs: str, size: int | None = 1) -> FusionGraph:
    """Return the graph with a reason for each pair, as in "a b"."""
    return replace(found, reasons=tuple(Reason(*pair.split(), "other", "no", "xla", size) for pair in pairs))


def prices(found: FusionGraph, ceilings: Ceilings | None = CEILINGS) -> list[tuple[int, int, float | None]]:
    return [(one.price.bytes, one.price.launches, one.price.us) for one in ranked(found, ceilings)]


def test_an_intermediate_is_neither_written_nor_read_and_a_launch_vanishes() -> None:
    found = unfused(graph(step("a", "x", "m"), step("b", "m", "y")), "a b")
    assert prices(found) == [(2 * BUFFER, 1, 8.5)]
    assert prices(found, Ceilings({0.5: 1e9}, {})) == [(2 * BUFFER, 1, 8.0)]
    assert prices(found, None) == [(2 * BUFFER, 1, None)]


def test_an_input_of_both_kernels_is_read_once() -> None:
    """An RMSNorm in two kernels: the row sums are small, and x is read twice."""
    found = unfused(graph(step("sums", "x", "s"), step("scale", "x s w", "y"), sizes="s=1"), "sums scale")
    assert prices(found) == [(BUFFER + 2 * 4, 1, pytest.approx(4.508))]
    (one,) = ranked(found, CEILINGS)
    assert set(one.price.buffers) == {"x", "s"}


def test_the_launches_are_the_price_of_tiny_kernels() -> None:
    found = unfused(
        graph(step("a", "x", "m"), step("b", "m", "n"), step("c", "n", "y"), sizes="x=1 m=1 n=1 y=1"), "a b", "b c"
    )
    assert prices(found) == [(8, 1, pytest.approx(0.508))] * 2
    assert together(found, CEILINGS).us == pytest.approx(2 * 0.508)


def test_kernels_of_a_loop_vanish_in_each_iteration() -> None:
    found = unfused(graph(step("a", "x", "m", launches=3), step("b", "m", "y", launches=3)), "a b")
    assert prices(found) == [(3 * 2 * BUFFER, 3, 25.5)]
    unknown = unfused(graph(step("a", "x", "m", launches=None), step("b", "m", "y")), "a b")
    assert prices(unknown) == [(BUFFER, 0, 4.0)]  # the read alone is known


def test_a_read_of_three_kernels_is_repeated_twice() -> None:
    """Two of the three fusions save the same reads as all three, and one launch fewer than there are kernels."""
    found = unfused(graph(step("a", "x", "p"), step("b", "x", "q"), step("c", "x", "r")), "a b", "b c", "a c")
    assert prices(found) == [(BUFFER, 1, 4.5)] * 3
    total = together(found, CEILINGS)
    assert (total.bytes, total.launches, total.us) == (2 * BUFFER, 2, 9.0)
    assert together(unfused(found, "a b", "b c"), CEILINGS) == total


def test_a_buffer_of_two_readers_stays_unless_both_are_fused() -> None:
    made = graph(step("a", "x", "m"), step("b", "m", "p"), step("c", "m", "q"))
    assert prices(unfused(made, "a b", "a c")) == [(BUFFER, 1, 4.5)] * 2
    total = together(unfused(made, "a b", "a c"), CEILINGS)
    assert (total.bytes, total.launches) == (3 * BUFFER, 2)
    assert together(unfused(made, "a b"), CEILINGS).bytes == BUFFER


def test_kernels_that_other_kernels_lie_between_share_a_read_when_all_are_fused() -> None:
    chain = graph(step("a", "x", "s"), step("b", "s", "t"), step("c", "t x", "y"), sizes="s=1 t=1")
    found = unfused(chain, "a b", "b c")
    assert [size for size, _, _ in prices(found)] == [8, 8]
    total = together(found, CEILINGS)
    assert (total.bytes, total.launches) == (16 + BUFFER, 2)


def test_separate_pairs_add_up() -> None:
    made = graph(step("a", "x", "m"), step("b", "m", "y"), step("c", "u", "n"), step("d", "n", "v"))
    found = unfused(made, "a b", "c d")
    assert together(found, CEILINGS).us == 17.0 == sum(us or 0.0 for _, _, us in prices(found))


def test_parts_of_an_array_may_be_different_parts() -> None:
    def reading(first: int, second: int) -> FusionGraph:
        one, two = step("a", "", "m"), step("b", "m", "y")
        made = graph(
            replace(one, inputs=(Access("x", first),)), replace(two, inputs=(*(two.inputs or ()), Access("x", second)))
        )
        return unfused(made, "a b")

    def shared(first: int, second: int) -> int:
        return prices(reading(first, second))[0][0] - 2 * BUFFER

    assert shared(BUFFER, BUFFER) == BUFFER and shared(BUFFER, 1000) == 1000
    assert shared(2000, 2000) == 0 and shared(3000, 3000) == 2000
    one, two = (replace(step(name, "", result), inputs=(Access("x", 2000),)) for name, result in ("am", "by"))
    assert ranked(unfused(graph(one, two), "a b", size=2000), CEILINGS) == []  # Q and K of one product


def test_an_array_that_is_overwritten_between_two_reads_is_not_the_same_data() -> None:
    made = graph(step("a", "x", "m"), step("o", "z", "x"), step("b", "m x", "y"), output="x")
    assert prices(unfused(made, "a b")) == [(2 * BUFFER, 1, 8.5)]


def test_a_fusion_with_an_update_in_place_saves_at_most_the_update() -> None:
    """A step of decoding: a row is written into the cache, and the whole cache is read."""
    row = replace(step("update", "row", "cache"), outputs=(Access("cache", 40),))
    decoded = graph(row, step("read", "cache", "y"), input="row cache", sizes="row=10")
    assert prices(unfused(decoded, "update read")) == [(40, 1, pytest.approx(0.54))]
    (edge,) = kernel_edges(decoded)
    assert bytes_saved(decoded, edge) == 40
    looped = graph(replace(row, launches=5), step("read", "cache", "y", launches=5), input="row cache", sizes="row=10")
    assert bytes_saved(looped, *kernel_edges(looped)) == 5 * 40
    once = graph(replace(row, launches=5), step("read", "cache", "y"), input="row cache", sizes="row=10")
    assert bytes_saved(once, *kernel_edges(once)) == 5 * 40


def test_the_rest_of_an_updated_buffer_comes_from_its_earlier_writers() -> None:
    update = replace(step("update", "row", "m"), outputs=(Access("m", 40),))
    made = graph(step("make", "x", "m"), update, step("read", "m", "y"), sizes="row=10")
    saved = {(edge.producer, edge.consumer): bytes_saved(made, edge) for edge in kernel_edges(made)}
    assert saved == {(0, 2): 2 * BUFFER, (1, 2): 2 * 40}
    total = together(unfused(made, "make read", "update read"), CEILINGS)
    assert total.bytes == 2 * BUFFER + 40  # the update's write vanishes, too
    halves = [replace(step(name, name, "m"), outputs=(Access("m", BUFFER // 2),)) for name in ("left", "right")]
    joined = graph(*halves, step("read", "m", "y"))
    assert [bytes_saved(joined, edge) for edge in kernel_edges(joined)] == [BUFFER, BUFFER]


def test_reasons_of_no_known_saving_are_left_out() -> None:
    made = graph(step("a", "x", "m"), step("b", "m", "y"))
    for size in (None, 0):
        assert ranked(unfused(made, "a b", size=size), CEILINGS) == []
        assert together(unfused(made, "a b", size=size), CEILINGS).us == 0.0


def test_a_reason_of_unknown_kernels_keeps_its_bytes() -> None:
    made = graph(step("a", "x", "m"), step("b", "m", "y"))
    assert prices(unfused(made, "a gone", size=7000)) == [(7000, 0, 7.0)]
    assert together(unfused(made, "a gone", size=7000), CEILINGS).us == 0.0
    twice = graph(step("a", "x", "m"), step("b", "m", "y"), step("a", "u", "v"))
    assert prices(unfused(twice, "a b", size=7000)) == [(7000, 0, 7.0)]


def test_the_largest_price_comes_first() -> None:
    made = graph(step("a", "x", "m"), step("b", "m", "n"), step("c", "n x", "y"), sizes="x=1000 m=10 n=500")
    found = ranked(unfused(made, "a b", "b c"), CEILINGS)
    assert [one.reason.producer for one in found] == ["b", "a"]


@pytest.mark.parametrize("run", ["h200-small", "h200-rmsnorm"])
def test_prices_of_recorded_graphs_are_at_least_their_intermediates(run: str) -> None:
    """On every edge: a kernel that reads the other one's result. All fusions together save no less than any one."""
    ceilings = target_ceilings("h200")
    repeated = 0
    for case in open_source(RUNS / run).cases:
        for result in case.results:
            if (found := result.graph) is None or not (priced := ranked(found, ceilings)):
                continue
            assert together(found, ceilings).us >= priced[0].price.us - 1e-9  # type: ignore[operator]
            assert all((one.price.us or 0.0) >= (two.price.us or 0.0) for one, two in pairwise(priced))
            for one in priced:
                if _passes_data(found, one):
                    assert one.price.bytes >= (one.reason.bytes_saved or 0)
                    repeated += one.price.bytes > (one.reason.bytes_saved or 0)
    assert repeated


def _passes_data(found: FusionGraph, one: MissedFusion) -> bool:
    named = {kernel.name: kernel for kernel in found.kernels or ()}
    written = {access.buffer for access in named[one.reason.producer].outputs or ()}
    return any(access.buffer in written for access in named[one.reason.consumer].inputs or ())


def test_the_price_of_a_launch_is_the_targets_measurement() -> None:
    folder = Path(__file__).parents[4] / "compare" / "targets" / "h200" / "ceilings.json"
    measured = json.loads(folder.read_text())["launch"]["device_s"] * 1e6
    ceilings = target_ceilings("h200")
    found = unfused(graph(step("a", "x", "m"), step("b", "m", "y")), "a b")
    expected = 2 * BUFFER / ceilings.bandwidth(1, 1) * 1e6 + measured
    assert prices(found, ceilings)[0][2] == pytest.approx(expected)


def test_a_bandwidth_must_be_positive() -> None:
    with pytest.raises(ValueError, match="bandwidth must be positive"):
        ranked(graph(step("a", "x", "m")), Ceilings({0.5: 0.0}, {}))


def test_fusions_of_the_same_work_in_every_layer_are_one() -> None:
    layers = [(step(f"exp.{i}", f"x{i}", f"m{i}"), step(f"sum.{i}", f"m{i}", f"y{i}")) for i in range(3)]
    kernels = [replace(k, source_ops=step(k.name.split(".")[0], "", "").source_ops) for pair in layers for k in pair]
    other = step("other", "y2", "z")
    program = unfused(graph(*kernels, other), *(f"exp.{i} sum.{i}" for i in range(3)), "sum.2 other")
    found = folded(program, ranked(program, CEILINGS))
    assert [len(same.fusions) for same in found] == [3, 1]
    assert found[0].price.us == 3 * 8.5 and found[0].price.bytes == 3 * 2 * BUFFER and found[0].price.launches == 3
    assert sum(len(same.fusions) for same in found) == len(ranked(program, CEILINGS))
