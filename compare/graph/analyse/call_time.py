"""The predicted device time of a call: its kernels' times and the gaps between their launches."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

from ... import targets
from ..model import FusionGraph, Kernel, PredictedTime
from .totals import predicted_sum

LAUNCHES = "launches.json"  # python -m tools.fit_predictor writes it
FITTED_ON = "h200"  # the machine whose calls tell how soon a launch follows another


def call_time(graph: FusionGraph) -> PredictedTime:
    """Return the predicted time of a call, from the first kernel to the last of each phase.

    A kernel in a loop counts as often as it is launched. Between two launches is the gap that a CUDA graph has. Where
    Python launches each kernel, none starts sooner after the one before it than such a host launches it. The ends are
    those of all kernels' intervals, as kernels of one call may err alike. A kernel without a prediction leaves the call
    without one.
    """
    kernels = graph.kernels or ()
    whole = predicted_sum(kernels)
    if whole.us is None:
        return whole
    known = [kernel.predicted for kernel in kernels if kernel.predicted is not None]
    gap, interval = _launches()["gap_us"], _launches()["interval_us"].get(graph.compiler, 0.0)
    us, low, high = (
        span_us(kernels, [getattr(time, end) for time in known], gap, interval) for end in ("us", "low_us", "high_us")
    )
    return PredictedTime(us, low, high)


def known_call_time(graph: FusionGraph) -> tuple[PredictedTime, int]:
    """Return the time of a call of the kernels with a prediction, and how many are not in it."""
    kernels = graph.kernels or ()
    known = tuple(kernel for kernel in kernels if kernel.predicted_us is not None)
    return call_time(FusionGraph(graph.name, graph.compiler, known)), len(kernels) - len(known)


def span_us(kernels: Sequence[Kernel], times: Iterable[float], gap: float, interval: float) -> float:
    """Return the sum over phases of the time from the first kernel's start to the last one's end.

    times: of all launches of each kernel. gap: from a kernel's end to the next one's start. interval: from a launch to
    the next one.
    """
    ends: dict[str, float] = defaultdict(lambda: -gap)
    launched: dict[str, int] = defaultdict(int)
    for kernel, time in zip(kernels, times, strict=True):
        if count := kernel.certain_launches:
            one, before = time / count, launched[kernel.phase]
            rest = (count - 1) * (one + gap)
            launched[kernel.phase] += count
            # The GPU never waits for a launch, waits for the first of these last, or for all of them.
            ends[kernel.phase] = max(
                ends[kernel.phase] + gap + one + rest, before * interval + one + rest,
                (launched[kernel.phase] - 1) * interval + one,
            )
    return sum(ends.values())


@cache
def _launches() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((targets.FOLDER / FITTED_ON / LAUNCHES).read_text())
    return found
