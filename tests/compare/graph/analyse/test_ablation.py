"""Ablation: the savings of fusion, in total and by region."""

from __future__ import annotations

from dataclasses import replace

import pytest
from graph_builder import graph, kernel

from xlafuse.compare.graph.analyse.ablation import ablation
from xlafuse.compare.graph.model import FusionGraph

FUSED = graph(
    kernel("norm", "reduction", "n:mul@1 n:sum@1 n:rsqrt@2", "x", "h", device_time_us=5.0),
    kernel("dot", "gemm", "d:dot@3", "h w", "y", device_time_us=9.0),
    kernel("copy", "copy", "", "y", "z", device_time_us=1.0),
)
UNFUSED = graph(
    kernel("mul", "elementwise", "n:mul@1", "x", "a", device_time_us=4.0),
    kernel("sum", "reduction", "n:sum@1", "a", "b", device_time_us=3.0),
    kernel("rsqrt", "elementwise", "n:rsqrt@2", "b x", "h", device_time_us=5.0),
    kernel("dot", "gemm", "d:dot@3", "h w", "y", device_time_us=9.0),
    kernel("zeros", "memset", "", "", "q"),
)


def test_each_region_is_held_against_the_kernels_of_its_operations() -> None:
    found = ablation(FUSED, UNFUSED)
    norm, dot = found.regions
    assert (norm.stages, norm.fused.kernels, norm.unfused.kernels) == (("n",), (0,), (0, 1, 2))
    assert norm.bytes_saved == 4000 * (2 + 2 + 3) - 8000 and norm.time_saved_us == 7.0
    assert (dot.fused.kernels, dot.unfused.kernels, dot.bytes_saved, dot.time_saved_us) == ((1,), (3,), 0, 0.0)
    assert found.only_fused == (2,) and found.only_unfused == (4,)


def test_the_total_is_of_whole_graphs() -> None:
    total = ablation(FUSED, UNFUSED).total
    assert (total.fused.launches.exact, total.unfused.launches.exact) == (3, 5)
    assert total.bytes_saved == 4000 * ((2 + 2 + 3 + 3 + 1) - (2 + 3 + 2))
    assert total.time_saved_us is None  # one kernel was not measured


def test_every_kernel_is_in_one_place() -> None:
    found = ablation(FUSED, UNFUSED)
    left = [i for region in found.regions for i in region.fused.kernels] + list(found.only_fused)
    right = [i for region in found.regions for i in region.unfused.kernels] + list(found.only_unfused)
    assert sorted(left) == [0, 1, 2] and sorted(right) == [0, 1, 2, 3, 4]


def test_kernels_that_compute_the_same_operation_twice_share_a_region() -> None:
    twice = graph(
        kernel("a", "elementwise", "s:exp@1 s:mul@2", "x", "p"), kernel("b", "elementwise", "s:exp@1 s:add@3", "x", "q")
    )
    apart = graph(
        kernel("exp", "elementwise", "s:exp@1", "x", "e"), kernel("mul", "elementwise", "s:mul@2", "e", "p"),
        kernel("add", "elementwise", "s:add@3", "e", "q"),
    )
    (region,) = ablation(twice, apart).regions
    assert region.fused.kernels == (0, 1) and region.unfused.kernels == (0, 1, 2)


@pytest.mark.parametrize("dropped", ["site", "line"])
def test_where_sites_say_nothing_lines_do_and_then_stages(dropped: str) -> None:
    kept = "" if dropped == "line" else "lines"

    def without(found: FusionGraph) -> FusionGraph:
        kernels = [
            replace(k, source_ops=tuple(replace(op, site="", line=kept and op.line) for op in k.source_ops))
            for k in found.kernels or ()
        ]
        return replace(found, kernels=tuple(kernels))

    assert [r.unfused.kernels for r in ablation(without(FUSED), without(UNFUSED)).regions] == [(0, 1, 2), (3,)]


def test_operations_without_kernels_are_refused() -> None:
    with pytest.raises(ValueError, match="operations only"):
        ablation(FUSED, replace(UNFUSED, kernels=None))
