"""The predicted time of each kernel of a graph, and of a call. None replaces a measured or recorded time."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace

from .. import targets
from ..graph.analyse.roofline import Ceilings
from ..graph.analyse.totals import predicted_sum
from ..graph.model import FusionGraph, PredictedTime


def with_predictions(graph: FusionGraph, ceilings: Ceilings | None, ran_on: str = "") -> FusionGraph:
    """Return the graph with a prediction, or the reason why there is none, for each kernel; measured times stay.

    ceilings: the rates of the device that the graph was compiled for. Another GPU's do not serve: it has other kernels.
    ran_on: that device, where the graph does not say it.
    """
    if not graph.kernels:
        return graph
    times = _times(graph if graph.target else replace(graph, target=ran_on), ceilings)
    kernels = (replace(kernel, predicted=time) for kernel, time in zip(graph.kernels, times, strict=True))
    return replace(graph, kernels=tuple(kernels))


def _times(graph: FusionGraph, ceilings: Ceilings | None) -> list[PredictedTime]:
    device = None
    if ceilings is not None and targets.of_device(graph.target) is not None:
        from . import predictor  # numpy and the fitted trees, which a graph without a target does not need

        device = predictor.device_of(graph, ceilings)
    if device is None:
        whose = f"for {graph.target}" if graph.target else "where the graph does not say its GPU"
        return [PredictedTime(reason=f"nothing is fitted {whose}")] * len(graph.kernels or ())
    return [
        PredictedTime(found.time_us, found.low_us, found.high_us)
        if isinstance(found, predictor.Prediction) else PredictedTime(reason=found.reason)
        for found in predictor.predicted(graph, device)
    ]


# Time from one launch to the next where Python launches each kernel: of 40, 45, ... µs the one that puts most calls of
# reports/h200 within 20%. Calls that XLA's command buffers or a CUDA graph replay take the sum of their kernels.
_LAUNCH_INTERVAL_US = {"eager": 50.0, "inductor": 55.0, "triton": 70.0}


def call_time(graph: FusionGraph) -> PredictedTime:
    """Return the predicted time of a call, from the first kernel to the last of each phase.

    It is the sum of the kernels' times, and more where kernels are shorter than the interval of their launches.
    """
    kernels, interval = graph.kernels or (), _LAUNCH_INTERVAL_US.get(graph.compiler)
    whole = predicted_sum(kernels)
    if whole.us is None or interval is None:
        return whole
    ends: list[float] = []
    for end in ("us", "low_us", "high_us"):
        time: dict[str, float] = defaultdict(float)  # by phase, each of which is a call of its own
        launched: Counter[str] = Counter()
        for kernel in kernels:
            for _ in range(launches := kernel.certain_launches):
                start = max(time[kernel.phase], launched[kernel.phase] * interval)
                time[kernel.phase] = start + getattr(kernel.predicted, end) / launches
                launched[kernel.phase] += 1
        ends.append(sum(time.values()))
    return PredictedTime(ends[0], ends[1], ends[2])


def why_predicted(graph: FusionGraph, index: int, ceilings: Ceilings | None, ran_on: str = "") -> list[str]:
    """Return what drives the prediction for a kernel, in words; nothing where it has no prediction."""
    if ceilings is None or (graph.kernels or ())[index].predicted_us is None:
        return []
    from . import predictor

    graph = graph if graph.target else replace(graph, target=ran_on)
    device = predictor.device_of(graph, ceilings)
    return [] if device is None else predictor.why(graph, index, device)
