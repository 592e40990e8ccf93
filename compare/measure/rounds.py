"""Rounds of timed calls, the same for rows of the suite, users' functions and ranks.

A round of a program is a warm-up until its times settle, and then calls that a clock times. Ranks make a fixed number
of calls instead, because all of them must make the same ones.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from msgspec import convert

from ..record.record_fields import TimesOfPhase
from .clock import Clock, Sample
from .warm_up import Timed, WarmUp, warm_up

ROUNDS = 5  # of users' functions
_SECONDS = 0.02  # of a user's function in each round
_LEAST_CALLS, _MOST_CALLS = 4, 100  # the first does not count (compare.plan.paired_rounds)


def timed_round(
    clock: Clock, call: Callable[[Timed], None], *, phases: int, seconds: float, settled: Callable[[], None]
) -> tuple[WarmUp, list[Sample]]:
    """Warm up, then time calls for about `seconds`. Return the samples, `phases` a call.

    settled: called between the two. Raises the program's errors, and RuntimeError where the clock saw no device work.
    """
    clock.start()  # once: starting and ending it for each batch took 8 to 12 ms a warm-up on an H200
    try:
        warm = warm_up(clock, call, phases)
        settled()
        count = max(_LEAST_CALLS, min(_MOST_CALLS, int(seconds / warm.seconds_a_call)))
        return warm, timed_calls(clock, call, count)
    except Exception:
        with contextlib.suppress(Exception):  # the first error is reported
            clock.collect()  # ends the recording, which would slow this process's next compile
        raise


def timed_calls(clock: Clock, call: Callable[[Timed], None], count: int) -> list[Sample]:
    """Time calls by a clock that was started, and end its recording."""
    for _ in range(count):
        call(clock.time)
    samples = clock.collect()
    if any(sample.records == () for sample in samples):
        raise RuntimeError(f"the {clock.name} clock saw no device work in a timed call")
    return samples


def summary(samples: Sequence[Sample]) -> dict[str, Any]:
    """Return a phase's samples of one round as JSON data: `device_time` and `busy_time` in seconds.

    `records` are those of a median call, `launches` their number. Values that a clock without kernel records cannot
    know are None.
    """
    middle = statistics.median_low(sample.device_time for sample in samples)
    records = next(sample.records for sample in samples if sample.device_time == middle)
    busy_times = [sample.busy_time for sample in samples]
    return {
        "device_time": [sample.device_time for sample in samples],
        "busy_time": None if None in busy_times else busy_times,
        "launches": None if records is None else len(records),
        "records": None if records is None else [asdict(record) for record in records],
    }


def joined(rounds: Sequence[Mapping[str, Any]], records: Any = None) -> TimesOfPhase:
    """Return one phase's samples over rounds, each as of `summary`. records: as JSON data."""
    busy_times = [one["busy_time"] for one in rounds]
    return convert(
        {
            "device_time": [one["device_time"] for one in rounds],
            "busy_time": None if None in busy_times else busy_times, "launches": rounds[0]["launches"],
            "records": records, "poisoned": all(one.get("poisoned", False) for one in rounds),
        },
        TimesOfPhase,
    )


def rounds_of(
    programs: Mapping[str, Callable[[], Any]], clock: Clock, flush_l2: Callable[[], object],
    synchronize: Callable[..., None],
) -> dict[str, list[dict[str, Any]]]:
    """Return each program's rounds from a cold L2: `summary`, and whether the warm-up has `settled`.

    Each round begins with another program.
    """
    names = list(programs)
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in names}

    def round_of(program: Callable[[], Any]) -> dict[str, Any]:
        def call(timed: Timed) -> None:
            flush_l2()
            timed(program, synchronize)

        warm, samples = timed_round(clock, call, phases=1, seconds=_SECONDS, settled=lambda: None)
        return summary(samples) | {"records": None, "settled": warm.settled}

    for number in range(ROUNDS):
        start = number % len(names)
        for name in names[start:] + names[:start]:
            found[name].append(round_of(programs[name]))
    return found
