"""Comparisons from paired rounds: each implementation against the baseline, by every timer that timed both.

A timer is the device time of one mode (compare.plan.timing_modes), or the wall time. Only times of the same timer, in
one segment, by one clock are compared.
"""

from __future__ import annotations

import statistics
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ..backends import worker_of
from ..record.record import Record
from ..record.record_fields import TimesOfPart
from .speedup import DEPENDS, Speedup, compare, contradiction
from .timing_modes import MAIN, OTHER_MODES

BASELINE = "xla"
WALL = "wall"
TIMER_NAMES = {
    MAIN: "cold device time", "warm": "warm device time", "graph": "device time as a graph",
    "no-graph": "device time without graphs", WALL: "wall time",
}
TIMERS = tuple(TIMER_NAMES)


@dataclass(frozen=True)
class Rounds:
    """Times of one record's rounds.

    times: by timer, the median of a whole call in each round, in seconds; of train, forward plus backward.
    processes: the number of each round's process; empty for older records.
    """

    times: dict[str, list[float]]
    processes: list[int]


def measured_parts(record: Record, mode: str = MAIN) -> dict[str, TimesOfPart]:
    """Return the times of each part that count; empty for a record that is not `ok`, or was not timed in the mode."""
    if record.status != "ok" or record.measurement is None:
        return {}
    found: Any = record.measurement.get("modes", {}).get(mode, {})
    parts = record.times if mode == MAIN or "same_as" in found else found.get("parts", {})
    return {name: _without_first_calls(times) for name, times in parts.items()}


def _without_first_calls(times: TimesOfPart) -> TimesOfPart:
    """Leave out the first call of each round that has three or more.

    PyTorch's backward phase has a gap of about 1 ms in it, and programs that are launched as a whole have none. CUPTI
    was asked for its records before that call. So we take it that a thread waits for a new buffer of CUPTI's at its
    next launch; the backward phase launches from a thread of its own (docs/measuring.md).
    """
    busy = times["busy_time"]
    return {
        **times, "device_time": _later(times["device_time"]), "busy_time": None if busy is None else _later(busy),
    }


def _later(rounds: list[list[float]]) -> list[list[float]]:
    return [samples[1:] if len(samples) > 2 else samples for samples in rounds]


def rounds_of(record: Record) -> Rounds:
    times = {mode: _round_times(record, mode) for mode in (MAIN, *OTHER_MODES)}
    processes: list[int] = []
    if record.status == "ok" and record.measurement is not None:
        times[WALL] = record.measurement.get("wall_time", [])
        processes = record.measurement.get("processes", [])
    return Rounds({timer: found for timer, found in times.items() if found}, processes)


def _round_times(record: Record, mode: str) -> list[float]:
    parts = measured_parts(record, mode)
    if not all(part in parts for part in record.case.phases):
        return []
    medians = [[statistics.median(samples) for samples in parts[part]["device_time"]] for part in record.case.phases]
    return [sum(times) for times in zip(*medians, strict=True)]


def device_time_us(record: Record, mode: str = MAIN) -> float | None:
    """Return the device time of a call: each part's median over the calls that count, added; None without a part."""
    parts = measured_parts(record, mode)
    if not all(part in parts for part in record.case.phases):
        return None
    samples = [[s for found in parts[part]["device_time"] for s in found] for part in record.case.phases]
    return sum(statistics.median(found) for found in samples) * 1e6


def column_prefix(timer: str) -> str:
    """Return a timer's or mode's name as columns spell it."""
    return timer.replace("-", "_")


def add_comparisons(rows: list[dict[str, Any]], rounds: list[Rounds], uncalibrated: Container[str] = ()) -> None:
    """Fill each row's comparison with the baseline's.

    rounds: `rounds_of` each row's record. uncalibrated: segments in which the workers' clocks disagree.
    """
    baseline = {
        comparison_key(row, uncalibrated): (row, its) for row, its in zip(rows, rounds, strict=True)
        if row["implementation"] == BASELINE and row["device_time_us"]
    }
    for row, own in zip(rows, rounds, strict=True):
        if not row["device_time_us"] or (key := comparison_key(row, uncalibrated)) not in baseline:
            continue
        reference, its = baseline[key]
        row["time_vs_xla"] = row["device_time_us"] / reference["device_time_us"]
        if row is not reference:
            _fill(row, _speedups(own, its))


def comparison_key(row: Mapping[str, Any], uncalibrated: Container[str] = ()) -> tuple[Any, ...]:
    """Return what is equal for rows whose times may be compared. uncalibrated: as for `add_comparisons`."""
    same = tuple(row[k] for k in ("block", "case", "direction", "dtype", "precision", "segment", "timer", "target"))
    return (*same, row["segment"] in uncalibrated and worker_of(row["compiler"]) == "xla")


@dataclass(frozen=True)
class Comparison:
    """One implementation against another. main: by cold device time. word: main's, or DEPENDS. text: in words."""

    main: Speedup
    word: str
    text: str


def compare_rounds(own: Rounds, its: Rounds) -> Comparison | None:
    """Return None where the rounds were not taken side by side, or are too few."""
    return _comparison(_speedups(own, its))


def _comparison(speedups: Mapping[str, Speedup]) -> Comparison | None:
    if (main := speedups.get(MAIN)) is None:
        return None
    opposite = contradiction({TIMER_NAMES[timer]: speedups[timer] for timer in TIMERS if timer in speedups})
    return Comparison(main, DEPENDS if opposite else main.word, opposite or str(main))


def _speedups(own: Rounds, its: Rounds) -> dict[str, Speedup]:
    """By every timer of both. Only rounds taken side by side are paired."""
    if own.processes != its.processes:
        return {}
    found = {}
    for timer in own.times.keys() & its.times.keys():
        a, b = own.times[timer], its.times[timer]
        if len(a) == len(b) and (speedup := compare(a, b, own.processes)):
            found[timer] = speedup
    return found


def _fill(row: dict[str, Any], speedups: Mapping[str, Speedup]) -> None:
    for timer, speedup in speedups.items():
        prefix = column_prefix(timer)
        row[f"{prefix}_vs_xla"], row[f"{prefix}_vs_xla_word"] = speedup.ratio, speedup.word
    if found := _comparison(speedups):
        row["verdict_vs_xla"] = found.text
        row["verdict_vs_xla_low"], row["verdict_vs_xla_high"] = found.main.low, found.main.high
        row["verdict_vs_xla_word"] = found.word


def rows_in_both(a: list[dict[str, Any]], b: list[dict[str, Any]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return pairs of two runs' rows on the same implementation of the same case, where both have a verdict."""
    names = ("block", "case", "dtype", "precision", "direction", "implementation")
    judged = [{tuple(row[name] for name in names): row for row in rows if row["verdict_vs_xla"]} for rows in (a, b)]
    return [(row, judged[1][key]) for key, row in judged[0].items() if key in judged[1]]


def opposite_winners(pairs: Iterable[tuple[dict[str, Any], dict[str, Any]]]) -> list[str]:
    """Return, in words, where two runs name opposite winners by the same timer, of an implementation and the baseline.
    """
    found = []
    for one, other in pairs:
        what = "/".join(str(one[name]) for name in ("block", "case", "dtype", "direction", "implementation"))
        for timer in TIMERS:
            words = [row[f"{column_prefix(timer)}_vs_xla_word"] for row in (one, other)]
            if set(words) == {"faster", "slower"}:
                found.append(f"{what}: {words[0]} in the one, {words[1]} in the other, by {TIMER_NAMES[timer]}")
    return found
