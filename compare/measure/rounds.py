"""Interleaved rounds of several programs from a cold L2, timed as `compare.measure.measurement` times a case."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from typing import Any

from .clock import Clock
from .warm_up import Timed, warm_up

ROUNDS = 5
_SECONDS = 0.02  # of timed calls, for each program in each round
_LEAST_CALLS, _MOST_CALLS = 5, 100  # that count

# Median "device_us" and "busy_us" of a call, "launches" of its last one, and whether the warm-up "settled".
Round = dict[str, Any]


def rounds_of(
    calls: Mapping[str, Callable[[], Any]],
    clock: Clock,
    flush_l2: Callable[[], None],
    synchronize: Callable[..., None],
) -> dict[str, list[Round]]:
    """Return each program's rounds. Each round begins with another program."""
    names = list(calls)
    found: dict[str, list[Round]] = {name: [] for name in names}
    for number in range(ROUNDS):
        start = number % len(names)
        for name in names[start:] + names[:start]:
            found[name].append(_round(calls[name], clock, flush_l2, synchronize))
    return found


def _round(
    program: Callable[[], Any], clock: Clock, flush_l2: Callable[[], None], synchronize: Callable[..., None]
) -> Round:
    def call(timed: Timed) -> None:
        flush_l2()
        timed(program, synchronize)

    clock.start()
    warm = warm_up(clock, call, 1)
    for _ in range(1 + max(_LEAST_CALLS, min(_MOST_CALLS, int(_SECONDS / warm.seconds_a_call)))):
        call(clock.time)
    samples = clock.collect()[1:]  # the first call may have a gap (compare.plan.paired_rounds)
    if any(sample.records == () for sample in samples):
        raise RuntimeError(f"the {clock.name} clock saw no device work in a timed call")
    busy = [sample.busy_time for sample in samples if sample.busy_time is not None]
    records = samples[-1].records
    return {
        "device_us": statistics.median(sample.device_time for sample in samples) * 1e6,
        "busy_us": statistics.median(busy) * 1e6 if busy else None,
        "launches": None if records is None else len(records),
        "settled": warm.settled,
    }
