"""The predicted time of each kernel of a graph. None replaces a measured or recorded time."""

from __future__ import annotations

from dataclasses import replace

from .. import targets
from ..graph.analyse.roofline import Ceilings
from ..graph.model import FusionGraph, PredictedTime
from . import links


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
    target = targets.of_device(graph.target)
    if ceilings is not None and target is not None:
        from . import predictor  # numpy and the fitted trees, which a graph without a target does not need

        device = predictor.device_of(graph, ceilings)
    if device is None:
        whose = f"for {graph.target}" if graph.target else "where the graph does not say its GPU"
        times = [PredictedTime(reason=f"nothing is fitted {whose}")] * len(graph.kernels or ())
    else:
        times = [
            PredictedTime(found.time_us, found.low_us, found.high_us)
            if isinstance(found, predictor.Prediction) else PredictedTime(reason=found.reason)
            for found in predictor.predicted(graph, device)
        ]
    return [
        links.predicted(kernel, target) if kernel.kind == "collective" and target is not None else time
        for kernel, time in zip(graph.kernels or (), times, strict=True)
    ]


def why_predicted(graph: FusionGraph, index: int, ceilings: Ceilings | None, ran_on: str = "") -> list[str]:
    """Return what drives the prediction for a kernel, in words; nothing where it has no prediction."""
    if ceilings is None or (graph.kernels or ())[index].predicted_us is None:
        return []
    graph = graph if graph.target else replace(graph, target=ran_on)
    kernel, target = (graph.kernels or ())[index], targets.of_device(graph.target)
    if kernel.kind == "collective" and target is not None:
        return links.why(kernel, target)
    from . import predictor

    device = predictor.device_of(graph, ceilings)
    return [] if device is None else predictor.why(graph, index, device)
