"""tools.xla_cost_model: estimates beside measured times, and the decisions that they caused."""

from __future__ import annotations

from dataclasses import replace

import pytest
from graph_builder import graph, kernel

from tools import xla_cost_model
from xlafuse.compare.graph.model import FusionGraph, Reason


def compiled() -> FusionGraph:
    """A producer and two consumers, with estimates."""
    estimates = {"analytical": 12.0, "sol": 0.01}
    kernels = (
        kernel("p", "elementwise", "s:exp@1", "x", "m"), kernel("a", "reduction", "s:sum@2", "m", "y"),
        kernel("b", "elementwise", "s:neg@3", "m", "z"),
    )
    reasons = tuple(Reason("p", name, "unprofitable", "", "xla", 1, 40.0, 30.0) for name in "ab")
    made = graph(*(replace(k, facts={"xla_estimates_us": estimates}) for k in kernels))
    return replace(made, reasons=reasons)


TIMES = {0: 10.0, 1: 6.0, 2: 4.0}


def test_each_model_is_compared_with_a_launch_and_placeholders_are_no_estimates() -> None:
    found = xla_cost_model.estimates([("softmax/a", compiled(), TIMES), ("softmax/b", compiled(), TIMES)])
    assert [(one.record, one.model, one.ratio) for one in found] == [
        ("softmax/a", "analytical", 1.2), ("softmax/a", "analytical", 2.0),  # 4 us are too short
    ]
    summed = xla_cost_model.summary(found)
    assert summed["kernels"] == 2 and summed["median_error"] == pytest.approx(0.6)
    assert summed["by_time"] == pytest.approx((2 + 6) / 16)


def test_a_decision_is_about_a_producer_and_all_its_consumers() -> None:
    (one,) = xla_cost_model.decisions([("softmax/a", compiled(), TIMES)], "h200")
    assert (one.producer, one.consumers, one.measured_us, one.ratio) == ("p", ("a", "b"), 20.0, 1.5)
    assert one.saving_us > 0
    assert not xla_cost_model.decisions([("softmax/a", compiled(), {0: 10.0, 1: 6.0})], "h200")


def test_kernels_are_joined_by_their_work_not_by_their_names() -> None:
    class Result:
        def __init__(self, found: FusionGraph) -> None:
            self.id, self.graph = "softmax/a", found

    class Source:
        def __init__(self, *results: Result) -> None:
            self.results = results

    kernels = compiled().kernels or ()
    ran = replace(compiled(), kernels=tuple(
        replace(k, name=f"other.{at}", device_time_us=TIMES[at]) for at, k in reversed(list(enumerate(kernels)))
    ))
    ((_, _, times),) = xla_cost_model.joined(Source(Result(compiled())), Source(Result(ran)))  # type: ignore[arg-type]
    assert times == TIMES
