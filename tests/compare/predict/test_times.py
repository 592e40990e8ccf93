"""Predicted times on a graph, and where views show them: marked, and never in the place of measured ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from xlafuse.compare.graph import store
from xlafuse.compare.graph.analyse.call_time import call_time, known_call_time, span_us
from xlafuse.compare.graph.analyse.missed_fusions import ranked
from xlafuse.compare.graph.analyse.totals import predicted_sum
from xlafuse.compare.graph.findings.collect import findings
from xlafuse.compare.graph.findings.finding import Finding
from xlafuse.compare.graph.model import Access, Buffer, FusionGraph, Kernel, PredictedTime, Reason, SourceOp
from xlafuse.compare.graph.render import missed_view, text_view
from xlafuse.compare.predict.times import why_predicted, with_predictions
from xlafuse.compare.sources.opening import open_source
from xlafuse.compare.sources.target_ceilings import target_ceilings

H200 = target_ceilings("h200")
SIZE = 2 * 8192 * 8192
GELU = Kernel(
    "loop_gelu_fusion", "elementwise", source_ops=(SourceOp("mul"), SourceOp("tanh")), inputs=(Access("x", SIZE),),
    outputs=(Access("y", SIZE),),
)
TIMED = replace(GELU, device_time_us=70.0)


def graph_of(*kernels: Kernel, target: str = "h200") -> FusionGraph:
    buffers = (Buffer("x", (8192, 8192), "bf16", SIZE, "input"), Buffer("y", (8192, 8192), "bf16", SIZE, "output"))
    return FusionGraph("g", "xla", kernels, buffers, target=target)


def made(*kernels: Kernel, target: str = "h200") -> FusionGraph:
    return with_predictions(graph_of(*kernels, target=target), H200)


def times_of(graph: FusionGraph) -> list[PredictedTime]:
    return [kernel.predicted for kernel in graph.kernels or () if kernel.predicted is not None]


def test_each_kernel_has_a_time_in_its_interval_or_a_reason() -> None:
    known, unknown = times_of(made(GELU, replace(GELU, inputs=None)))
    assert known.us and known.low_us and known.high_us and known.low_us < known.us < known.high_us
    assert unknown.us is None and "bytes" in unknown.reason


@pytest.mark.parametrize("target", ["b200", "a100-80gb", ""])
def test_a_gpu_that_nothing_is_fitted_for_gives_a_reason(target: str) -> None:
    (time,) = times_of(made(GELU, target=target))
    assert time.us is None and target in time.reason
    assert not text_view.predicted_words(made(GELU, target=target))


def test_the_sum_of_a_call_needs_all_its_kernels() -> None:
    kernels = made(GELU, GELU).kernels or ()
    one, both = kernels[0].predicted, predicted_sum(kernels)
    assert one is not None and one.us is not None and both.us == pytest.approx(2 * one.us)
    part = made(GELU, replace(GELU, launches=None))
    whole, (known, unknown) = call_time(part), known_call_time(part)
    assert whole.us is None and "launches" in whole.reason and (known.us, unknown) == (one.us, 1)
    assert "at least ~" in text_view.predicted_words(part) and "1 not predicted" in text_view.predicted_words(part)


def test_short_kernels_wait_for_their_launches_where_python_launches_them() -> None:
    short, long = (replace(GELU, predicted=PredictedTime(us, us, us)) for us in (1.0, 1000.0))

    def call(compiler: str, *kernels: Kernel) -> float | None:
        return call_time(replace(graph_of(*kernels), compiler=compiler)).us

    graph, eager = call("xla", short, short), call("triton", short, short)
    assert graph is not None and eager is not None and 2.0 < graph < 4.0 and eager > 30.0
    assert call("triton-cudagraphs", short, short) == graph
    assert call("triton", long, short) == call("xla", long, short) == 1000.0 + graph - 1.0
    assert call("triton", short, replace(short, phase="backward")) == 2.0  # each phase is a call
    assert call("triton", short, GELU) is None


@pytest.mark.parametrize("gap", [0.0, 0.5])
@pytest.mark.parametrize("interval", [0.0, 3.0, 50.0])
def test_launches_in_a_loop_take_as_long_as_one_by_one(gap: float, interval: float) -> None:
    counts, each = (1, 4, 2, 30, 1), (20.0, 0.5, 90.0, 4.0, 1.0)
    end, launched = -gap, 0
    for count, time in zip(counts, each, strict=True):
        for _ in range(count):
            end = max(end + gap, launched * interval) + time
            launched += 1
    loops = [replace(GELU, launches=count) for count in counts]
    times = [count * time for count, time in zip(counts, each, strict=True)]
    assert span_us(loops, times, gap, interval) == pytest.approx(end)


def test_equal_graphs_stay_equal_with_predictions_and_a_saved_one_has_none(tmp_path: Path) -> None:
    assert made(GELU) == graph_of(GELU)
    assert "predicted" not in store.to_json(graph_of(GELU))["kernels"][0]
    assert store.to_json(made(GELU))["kernels"][0]["predicted"]["us"] > 0
    assert store.from_json(store.to_json(made(GELU))) == graph_of(GELU)


def test_a_list_of_kernels_marks_predicted_times_and_shows_none_beside_measured_ones() -> None:
    text = text_view.text(made(GELU))
    assert "~" in text and "a call is predicted to take ~" in text
    assert "~" not in text_view.text(made(TIMED)) and "~" not in text_view.text(graph_of(GELU))


def test_one_kernel_shows_its_prediction_with_its_causes_beside_a_measured_time() -> None:
    graph = made(TIMED)
    why = why_predicted(graph, 0, H200)
    text = text_view.render(text_view.kernel(graph, 0, ceilings=H200, why=why))
    assert "measured 70.0 µs" in text and "predicted ~" in text and "roofline time and launch" in text
    unknown = made(replace(GELU, launches=None))
    assert why_predicted(unknown, 0, H200) == []
    assert "not predicted: " in text_view.render(text_view.kernel(unknown, 0, ceilings=H200))


def test_a_finding_from_predicted_times_is_marked() -> None:
    (slow,) = (kernel for kernel in made(GELU).kernels or ())
    slow = replace(slow, predicted=PredictedTime(300.0, 250.0, 350.0))
    found = findings({"xla": graph_of(slow)}, H200)[0]
    assert found.kind == "above roofline" and found.predicted and "~300 µs" in str(found) and "(~" in str(found)
    measured = findings({"xla": graph_of(replace(slow, device_time_us=300.0))}, H200)[0]
    assert measured.kind == "above roofline" and "~" not in str(measured)


def test_a_missed_fusion_says_what_its_two_kernels_take() -> None:
    second = replace(GELU, name="second", inputs=(Access("y", SIZE),))
    reason = Reason(GELU.name, "second", "other", "no", "inferred", bytes_saved=10**8)

    def why(*kernels: Kernel) -> dict[str, object]:
        graph = replace(made(*kernels), reasons=(reason,))
        shown = missed_view.to_json(graph, H200, "h200")["missed"][0]
        assert ("~" in text_view.render(missed_view.tree(graph, H200, "h200"))) == bool(shown["kernels_predicted"])
        return dict(shown)

    compiled = why(GELU, second)
    assert compiled["kernels_us"] is None and compiled["kernels_predicted"]
    timed = why(TIMED, replace(second, device_time_us=30.0))
    assert timed["kernels_us"] == 100.0 and timed["kernels_predicted"] is None
    half = why(TIMED, second)
    assert half["kernels_us"] is half["kernels_predicted"] is None


def test_a_result_shows_no_predictions_where_something_was_measured(tmp_path: Path) -> None:
    store.save(graph_of(GELU, TIMED), tmp_path / "partly.json")
    store.save(graph_of(GELU), tmp_path / "compiled.json")
    (partly,), (compiled,) = (open_source(tmp_path / f"{name}.json").results for name in ("partly", "compiled"))
    assert partly.timed_graph is not None and not times_of(partly.timed_graph) and partly.row.predicted is None
    assert partly.predicted_graph is not None and len(times_of(partly.predicted_graph)) == 2
    assert compiled.timed_graph is not None and len(times_of(compiled.timed_graph)) == 1
    assert compiled.row.predicted_time_us and compiled.row.device_time_us is None


def pair(first: Kernel = GELU) -> FusionGraph:
    """Return a kernel and one that reads its result, the array `y`; half of the bytes of each."""
    second = replace(GELU, name="second", inputs=(Access("y", SIZE),), outputs=(Access("z", SIZE),))
    x, y = graph_of().buffers
    buffers = (x, replace(y, role="intermediate"), replace(y, name="z"))
    reason = Reason(first.name, "second", "other", "no", "inferred", bytes_saved=2 * SIZE)
    return with_predictions(FusionGraph("g", "xla", (first, second), buffers, (reason,), target="h200"), H200)


def test_the_price_of_a_missed_fusion_is_the_share_of_the_kernels_predicted_times() -> None:
    """In a product, which arithmetic may bound, the array's bytes take a copy's bandwidth."""
    (whole,) = ranked(pair(), H200)
    one, two = (time.us or 0.0 for time in times_of(pair()))
    assert whole.price.predicted and whole.price.us == pytest.approx((one + two) / 2)
    assert whole.price.time.startswith("~")
    (product,) = ranked(pair(replace(GELU, kind="gemm", flops=1e12)), H200)
    assert product.price.us == pytest.approx(SIZE / H200.bandwidth(1, 1) * 1e6 + two / 2, rel=0.01)
    for first in (replace(GELU, outputs=(Access("y", SIZE), Access("w", None))), TIMED):
        (other,) = ranked(pair(first), H200)
        assert not other.price.predicted and "~" not in other.price.time


def test_an_array_between_kernels_takes_its_share_of_their_predicted_times() -> None:
    def largest(graph: FusionGraph) -> Finding:
        (found,) = (one for one in findings({"xla": graph}, H200) if one.kind == "largest")
        return found

    graph = replace(pair(), reasons=())
    found = largest(graph)
    assert found.predicted and found.us == pytest.approx(sum(time.us or 0.0 for time in times_of(graph)) / 2)
    assert "(~" in str(found)
    measured = largest(replace(pair(TIMED), reasons=()))
    assert not measured.predicted and "~" not in str(measured)
