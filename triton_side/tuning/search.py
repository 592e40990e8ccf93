"""Find the fastest of several configurations, and accept it only if it beats the present one by more than the noise."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

FINALISTS = 4  # timed again, in rounds with the present configuration
ROUNDS = 7  # with noise alone, a finalist beats the present one in all rounds with a chance of 1 in 3432
LEAST_GAIN = 0.01  # a smaller difference is a tie, as in a report

# Returns the seconds of a configuration, and is more accurate if the second argument is true. Infinite: it cannot run.
Timer = Callable[[Any, bool], float]


@dataclass(frozen=True)
class Found:
    """The fastest configuration, its time and the time of the present one: medians in seconds."""

    config: Any
    seconds: float
    before: float


def search(present: Any, candidates: Sequence[Any], time: Timer) -> Found:
    """Time all candidates roughly, and the fastest of them in rounds with the present configuration.

    The present one stays unless a candidate was faster in each round than the present one in any, and by LEAST_GAIN or
    more in the median.
    """
    rough = {config: time(config, False) for config in candidates}
    finalists = sorted((c for c in rough if math.isfinite(rough[c])), key=rough.__getitem__)[:FINALISTS]
    times: dict[Any, list[float]] = {config: [] for config in (present, *finalists)}
    for _ in range(ROUNDS):
        for config in times:
            times[config].append(time(config, True))
    medians = {config: statistics.median(found) for config, found in times.items()}
    best, before = min(medians, key=medians.__getitem__), medians[present]
    beats_noise = max(times[best]) < min(times[present]) and medians[best] <= before * (1 - LEAST_GAIN)
    return Found(best if beats_noise else present, medians[best] if beats_noise else before, before)
