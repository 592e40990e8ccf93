"""The end of a warm-up: calls in batches, until the medians of two successive batches agree within 2%, or for 0.1 s.

The warm-up compares busy time, the time in which the GPU works. Device time includes the host's gaps, whose medians
over a few calls seldom agree: on an H200's host 14% of rounds did not settle within 0.1 s.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .clock import Clock

Timed = Callable[[Callable[[], Any], Callable[..., None]], Any]  # Clock.time, or a function in its place

SETTLED = 0.02  # relative difference of two successive medians
MOST_SECONDS = 0.1  # no further batch begins after it; for each implementation in each round and mode
MOST_CALLS = 100  # of one batch
_FIRST_BATCH_SECONDS = 0.001  # host time; each further batch takes twice as long


@dataclass(frozen=True)
class WarmUp:
    """A finished warm-up. seconds_a_call: host time of a call, with the L2 flush and poisoning around it."""

    seconds: float
    settled: bool
    seconds_a_call: float


def untimed(call: Callable[[], Any], synchronize: Callable[..., None]) -> Any:
    """Call and wait, with the signature of Clock.time."""
    result = call()
    synchronize(result)
    return result


def warm_up(clock: Clock, call: Callable[[Timed], None], phases: int) -> WarmUp:
    """Make calls until their times settle. phases: how many timed phases a call has.

    One untimed call comes first; it refills the caches that other implementations emptied. Batches then double.
    """
    started = time.perf_counter()
    call(untimed)
    seconds_a_call = time.perf_counter() - started
    before: float | None = None
    batch_seconds = _FIRST_BATCH_SECONDS
    while True:
        calls = max(1, min(MOST_CALLS, int(batch_seconds / seconds_a_call)))
        batch_seconds *= 2
        median, seconds_a_call = _batch(clock, call, calls, phases)
        seconds = time.perf_counter() - started
        settled = before is not None and abs(median - before) <= SETTLED * before
        if settled or (before is not None and seconds >= MOST_SECONDS):
            return WarmUp(seconds, settled, seconds_a_call)
        before = median


def _batch(clock: Clock, call: Callable[[Timed], None], calls: int, phases: int) -> tuple[float, float]:
    """Return the median busy time and the mean host time of a call, in seconds.

    A clock that sees no kernels has no busy time; its device time, with the gaps, takes its place.
    """
    started = time.perf_counter()
    for _ in range(calls):
        call(clock.time)
    host = (time.perf_counter() - started) / calls
    samples = [s.device_time if s.busy_time is None else s.busy_time for s in clock.collect(going_on=True)]
    return statistics.median(sum(samples[at : at + phases]) for at in range(0, len(samples), phases)), host
