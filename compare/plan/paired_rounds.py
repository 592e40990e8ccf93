"""Comparisons from paired rounds: each implementation against the baseline, by every timer that timed both.

A timer is the device time of one mode (compare.plan.timing_modes), or the wall time. Only times of the same timer, in
one segment, by one clock are compared.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from msgspec.structs import replace

from ..record.record import Record
from ..record.record_fields import TimesOfPhase
from .speedup import DEPENDS, Speedup, compare, contradiction
from .timing_modes import MAIN, OTHER_MODES

T = TypeVar("T")
BASELINE = "xla"
WALL = "wall"
TIMER_NAMES = {
    MAIN: "cold device time", "warm": "warm device time", "graph": "device time as a graph",
    "no-graph": "device time without graphs",
    "triton-launch": "device time by Triton's own launches", WALL: "wall time",
}
TIMERS = tuple(TIMER_NAMES)


@dataclass(frozen=True)
class Rounds:
    """Times of one record's rounds.

    times: by timer, the median of a whole call in each round, in seconds; of train, forward plus backward.
    processes: the number of each round's process; empty where no process was noted.
    """

    times: dict[str, list[float]]
    processes: list[int]


def measured_phases(record: Record, mode: str = MAIN) -> dict[str, TimesOfPhase]:
    """Return the times of each phase that count; empty for a record that is not `ok`, or was not timed in the mode."""
    if record.status != "ok" or record.measurement is None:
        return {}
    timed = record.measurement.modes.get(mode)
    is_main = mode == MAIN or (timed is not None and timed.same_as is not None)
    phases = record.times if is_main else (timed and timed.phases) or {}
    return {name: counted(times) for name, times in phases.items()}


def counted(times: TimesOfPhase) -> TimesOfPhase:
    """Leave out the first call of each round that has three or more.

    PyTorch's backward phase has a gap of about 1 ms in it, and programs that are launched as a whole have none. CUPTI
    was asked for its records before that call. So we take it that a thread waits for a new buffer of CUPTI's at its
    next launch; the backward phase launches from a thread of its own (docs/measuring.md).
    """
    device_time, busy_time = (rounds and list(map(later, rounds)) for rounds in (times.device_time, times.busy_time))
    return replace(times, device_time=device_time, busy_time=busy_time)


def later(calls: list[T]) -> list[T]:
    """Return the calls of a round that count."""
    return calls[1:] if len(calls) > 2 else calls


def rounds_of(record: Record) -> Rounds:
    times = {mode: _round_times(record, mode) for mode in (MAIN, *OTHER_MODES)}
    processes: list[int] = []
    if record.status == "ok" and record.measurement is not None:
        times[WALL] = record.measurement.wall_time
        processes = record.measurement.processes
    return Rounds({timer: found for timer, found in times.items() if found}, processes)


def _round_times(record: Record, mode: str) -> list[float]:
    phases = measured_phases(record, mode)
    if not all(phase in phases for phase in record.case.phases):
        return []
    return round_medians([phases[phase].device_time for phase in record.case.phases])


def round_medians(phases: Iterable[list[list[float]]]) -> list[float]:
    """Return a call's time in each round: the medians of its phases, added."""
    return [sum(times) for times in zip(*([statistics.median(s) for s in rounds] for rounds in phases), strict=True)]


def device_time_us(record: Record, mode: str = MAIN) -> float | None:
    """Return the device time of a call in a mode; None without a phase."""
    phases = measured_phases(record, mode)
    if not all(phase in phases for phase in record.case.phases):
        return None
    return sum(median_us(phases[phase].device_time) for phase in record.case.phases)


def median_us(rounds: Iterable[list[float]]) -> float:
    """Return the median over all calls that count, of samples in seconds."""
    return statistics.median(sample for samples in rounds for sample in samples) * 1e6


def column_prefix(timer: str) -> str:
    """Return a timer's or mode's name as columns spell it."""
    return timer.replace("-", "_")


@dataclass(frozen=True)
class Comparison:
    """One implementation against another. main: by cold device time. word: main's, or DEPENDS. text: in words."""

    main: Speedup
    word: str
    text: str


def compare_rounds(own: Rounds, its: Rounds) -> Comparison | None:
    """Return None where the rounds were not taken side by side, or are too few."""
    return comparison(speedups(own, its))


def comparison(speedups: Mapping[str, Speedup]) -> Comparison | None:
    """Return the comparison that the speedups by timer make; None without one by cold device time."""
    if (main := speedups.get(MAIN)) is None:
        return None
    opposite = contradiction({TIMER_NAMES[timer]: speedups[timer] for timer in TIMERS if timer in speedups})
    return Comparison(main, DEPENDS if opposite else main.word, opposite or str(main))


def speedups(own: Rounds, its: Rounds) -> dict[str, Speedup]:
    """Return the speedup by every timer of both. Only rounds taken side by side are paired."""
    if own.processes != its.processes:
        return {}
    found = {}
    for timer in own.times.keys() & its.times.keys():
        a, b = own.times[timer], its.times[timer]
        if len(a) == len(b) and (speedup := compare(a, b, own.processes)):
            found[timer] = speedup
    return found


def opposite_winners(one: Mapping[str, Mapping[str, Speedup]], other: Mapping[str, Mapping[str, Speedup]]) -> list[str]:
    """Return, in words, where two runs name opposite winners by the same timer, of an implementation and the baseline.

    one, other: by record's id, the speedups against the baseline.
    """
    opposite = []
    for id in (id for id in one if id in other):
        for timer in TIMERS:
            words = [speedups[id][timer].word for speedups in (one, other) if timer in speedups[id]]
            if set(words) == {"faster", "slower"}:
                opposite.append(f"{id}: {words[0]} in the one, {words[1]} in the other, by {TIMER_NAMES[timer]}")
    return opposite
