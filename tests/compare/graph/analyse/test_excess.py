"""Graphs whose products compute more than another graph needs, and cases that do not count."""

from __future__ import annotations

from dataclasses import replace

import pytest
from graph_builder import graph, kernel

from xlafuse.compare.graph.analyse.excess import excesses
from xlafuse.compare.graph.analyse.roofline import Ceilings
from xlafuse.compare.graph.findings.collect import findings
from xlafuse.compare.graph.model import FusionGraph, Kernel

# 1e12 bytes and 1e14 FLOPs a second.
CEILINGS = Ceilings({0.5: 1e12}, {"float32-tf32": 1e14})


def product(stage: str, flops: float | None, us: float | None = None, **more: object) -> Kernel:
    return kernel(stage, "gemm", f"{stage}:dot@1", f"x w_{stage}", f"y_{stage}", flops=flops, device_time_us=us, **more)


def pair(dense: float, needed: float | None, us: tuple[float, float] | None = None) -> dict[str, FusionGraph]:
    slow, fast = us or (None, None)
    return {
        "xla": graph(product("up", dense / 2, slow), product("down", dense / 2, slow)),
        "triton": graph(product("up", needed and needed / 2, fast), product("down", needed and needed / 2, fast)),
    }


def ratios(*graphs: FusionGraph) -> list[tuple[int, float]]:
    return [(found.graph, round(found.flops / found.needed, 3)) for found in excesses(graphs)]


def test_a_dense_product_of_every_expert() -> None:
    (found,) = excesses(list(pair(8e9, 1e9).values()), CEILINGS)
    assert (found.graph, found.references, found.flops, found.needed, found.repeated) == (0, (1,), 8e9, 1e9, 0)
    assert found.us == pytest.approx(70.0) and found.kernels == (0, 1)
    (found,) = excesses(list(pair(8e9, 1e9).values()))
    assert found.us is None


@pytest.mark.parametrize(("needed", "expected"), [(1e9, [(0, 1.21)]), (1.02e9, [])])
def test_only_what_is_clearly_more(needed: float, expected: list[tuple[int, float]]) -> None:
    assert ratios(*pair(1.21e9, needed).values()) == expected


def test_the_references_are_those_with_the_fewest_flops() -> None:
    most, least = pair(8e9, 1e9).values()
    alike, half = graph(product("up", 1.03e9)), graph(product("up", 4e9))
    first, second = excesses([most, alike, least, half])
    assert (first.graph, first.references) == (0, (2, 1)) and (second.graph, second.references) == (3, (2, 1))


def test_of_what_may_multiply_all_must_be_known() -> None:
    most, least = pair(8e9, 1e9).values()
    for kind in ("library", "custom", "attention"):
        opaque = kernel("grouped", kind, "up:grouped_mm@1", "x w", "y")
        assert excesses([most, replace(least, kernels=(*(least.kernels or ()), opaque))]) == []
    assert excesses(list(pair(8e9, None).values())) == []
    sort = kernel("sort", "reduction", "route:sort@1", "x", "y")
    assert ratios(most, replace(least, kernels=(*(least.kernels or ()), sort))) == [(0, 8.0)]


def test_what_one_takes_for_a_product_another_may_compute_otherwise() -> None:
    reduced = kernel("up", "reduction", "up:mul@1 up:sum@1", "x w", "y", flops=4e9)
    assert excesses([graph(product("up", 4e9)), graph(reduced)]) == []
    assert excesses([graph(product("up", 4e9), product("down", 4e9)), graph(reduced, product("down", 4e9))]) == []


def test_what_is_computed_twice_is_another_story() -> None:
    forward = product("up", 1e9)
    kept = graph(forward, kernel("b", "gemm", "up:dot@1!", "dy w", "dx", flops=1e9, phase="backward"))
    both = kernel("b", "custom", "up:dot@1 up:dot@1!", "x w dy", "dx", flops=2e9, phase="backward")
    assert excesses([graph(forward, both), kept]) == []  # the site is forward's
    elsewhere = replace(both, source_ops=tuple(
        replace(op, site=f"{op.site}'", rematerialized=not op.backward) for op in both.source_ops
    ))
    assert excesses([graph(forward, elsewhere), kept]) == []  # on purpose
    (found,) = excesses([graph(product("up", 8e9), replace(both, flops=4e9)), kept], CEILINGS)
    assert (found.flops, found.repeated, found.needed, found.us) == (12e9, 2e9, 2e9, pytest.approx(80.0))


def test_only_a_faster_one_shows_that_less_is_enough() -> None:
    assert ratios(*pair(8e9, 1e9, us=(40.0, 20.0)).values()) == [(0, 8.0)]
    assert ratios(*pair(8e9, 1e9, us=(20.0, 40.0)).values()) == []


def test_a_forward_pass_is_no_measure_of_a_training_step() -> None:
    forward = product("up", 1e9)
    step = graph(forward, replace(forward, name="b", phase="backward"), replace(forward, name="c", phase="backward"))
    assert excesses([step, graph(forward)]) == []


def test_the_finding_has_the_time_at_the_rate_of_products() -> None:
    found = findings(pair(8e9, 1e9), CEILINGS)
    (told,) = [one for one in found if one.kind == "more FLOPs"]
    assert str(told) == (
        "XLA computes 8.00 GFLOP in the products of up and down, 8.0 times as many as Triton (1.00 GFLOP). "
        "(70.0 µs)"
    )
    assert told.graphs == ("xla", "triton") and told.kernels == {"xla": (0, 1)} and told.bytes == 0


def test_it_is_ranked_by_its_time_among_the_others() -> None:
    def order(flops: float) -> list[str]:
        graphs = pair(flops, 1e6)
        copy = kernel("copy", "copy", "", "big", "copied")
        graphs["xla"] = graph(*(graphs["xla"].kernels or ()), copy, sizes="big=1000000 copied=1000000")
        return [one.kind for one in findings(graphs, CEILINGS) if one.kind in ("more FLOPs", "copy")]

    assert order(9e8) == ["more FLOPs", "copy"]  # 9 µs against 8 MB in 8 µs
    assert order(7e8) == ["copy", "more FLOPs"]


def test_what_takes_next_to_nothing_of_the_time_is_not_said() -> None:
    assert [one.kind for one in findings(pair(8e9, 1e9, us=(600.0, 20.0)), CEILINGS)].count("more FLOPs") == 1
    assert [one.kind for one in findings(pair(8e9, 1e9, us=(800.0, 20.0)), CEILINGS)].count("more FLOPs") == 0


def test_without_ceilings_it_has_no_time_and_comes_last() -> None:
    found = findings(pair(8e9, 1e9))
    assert found[-1].kind == "more FLOPs" and found[-1].us is None
    untimed = findings(pair(8e9, 1e9), Ceilings({0.5: 1e12}, {"bfloat16": 1e14}))
    assert "more FLOPs" not in [one.kind for one in untimed]  # no rate of this type was measured
