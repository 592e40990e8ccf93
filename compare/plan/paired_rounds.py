"""Rounds to verdicts: each row against the baseline's, by every timer that both were timed with.

A timer is a mode's device time (compare.plan.timing_modes) or the wall time. Times of one are held only against times
of the same one, in one segment, by one clock.
"""

from __future__ import annotations

import statistics
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ..backends import worker_of
from ..record.record import Record
from .speedup import DEPENDS, Verdict, compare, flip
from .timing_modes import MAIN, OTHER_MODES

BASELINE = "xla"
WALL = "wall"
# By timer, as a verdict speaks of it.
_SPOKEN = {
    MAIN: "cold device time", "warm": "warm device time", "graph": "device time as a graph",
    "launches": "device time launch by launch", WALL: "wall time",
}
TIMERS = tuple(_SPOKEN)


@dataclass(frozen=True)
class Rounds:
    """times: by timer, of each round the median of a whole call in seconds: train's is forward's and backward's added.
    processes: of each round, the number of the process that it was taken in; empty where nothing is said of that."""

    times: dict[str, list[float]]
    processes: list[int]


def measured_parts(record: Record, mode: str = MAIN) -> dict[str, dict[str, Any]]:
    """What was timed of each part; nothing of a record that is not `ok`, nor of a mode that it was not timed in."""
    if record.status != "ok" or not record.measurement:
        return {}
    found = record.measurement if mode == MAIN else (record.measurement.get("modes") or {}).get(mode) or {}
    if found.get("same_as") == MAIN:
        found = record.measurement
    return found.get("parts") or {}


def rounds_of(record: Record) -> Rounds:
    """Raises ValueError, or what other types raise, for times that are none."""
    times = {mode: _round_times(record, mode) for mode in (MAIN, *OTHER_MODES)}
    measurement = record.measurement if record.status == "ok" and record.measurement else {}
    times[WALL] = list(measurement.get("wall_time") or [])
    if not all(time > 0 for found in times.values() for time in found):
        raise ValueError("a round took no time, or less")
    return Rounds({timer: found for timer, found in times.items() if found}, list(measurement.get("processes") or []))


def _round_times(record: Record, mode: str) -> list[float]:
    parts = measured_parts(record, mode)
    if not all(part in parts for part in record.case.parts):
        return []
    medians = [[statistics.median(samples) for samples in parts[part]["device_time"]] for part in record.case.parts]
    return [sum(times) for times in zip(*medians, strict=True)]


def fields(record: Record, device_time: float | None, busy_time: float | None) -> dict[str, Any]:
    """What a row says of how it was timed, and room for what `add` says of it; times in microseconds."""
    measurement = record.measurement if record.status == "ok" and record.measurement else {}
    buffers = measurement.get("command_buffers")
    modes = measurement.get("modes") or {}
    unavailable = [f"{mode}: {found['unavailable']}" for mode, found in modes.items() if "unavailable" in found]
    return {
        **{f"{mode}_time_us": call_us(record, mode) for mode in OTHER_MODES},
        "modes_unavailable": "; ".join(unavailable) or None,
        "in_command_buffers": sum(inside for inside, _ in buffers.values()) if buffers else None,
        "launch_gap": (device_time - busy_time) / device_time if device_time and busy_time is not None else None,
        "throttled_rounds": _throttled(measurement.get("conditions")),
        "unsettled_rounds": _unsettled(measurement.get("warm_up")),
        "processes": len(set(measurement.get("processes") or [])) or None,
        **{f"{timer}_vs_xla{what}": None for timer in TIMERS for what in ("", "_word")},
    }


def call_us(record: Record, mode: str = MAIN) -> float | None:
    """Device time of a call: the median over all samples of each part, added; None where one was not timed."""
    parts = measured_parts(record, mode)
    if not all(part in parts for part in record.case.parts):
        return None
    samples = [[s for found in parts[part]["device_time"] for s in found] for part in record.case.parts]
    return sum(statistics.median(found) for found in samples) * 1e6


def _throttled(conditions: Iterable[Mapping[str, Any] | None] | None) -> int | None:
    """How many rounds; None where nobody could see."""
    known = [found for found in conditions or [] if found is not None]
    return sum(bool(found["throttled"]) for found in known) if known else None


def _unsettled(warm_up: Mapping[str, Any] | None) -> int | None:
    return [*warm_up["settled"]].count(False) if warm_up and warm_up["settled"] else None


def add(rows: list[dict[str, Any]], rounds: list[Rounds], apart: Container[str] = ()) -> None:
    """Fill ratios and verdicts into the rows.

    rounds: `rounds_of` each row's record. apart: segments whose workers' clocks disagree.
    """

    baseline = {
        comparable(row, apart): (row, its) for row, its in zip(rows, rounds, strict=True)
        if row["implementation"] == BASELINE and row["device_time_us"]
    }
    for row, mine in zip(rows, rounds, strict=True):
        if not row["device_time_us"] or comparable(row, apart) not in baseline:
            continue
        reference, its = baseline[comparable(row, apart)]
        row["time_vs_xla"] = row["device_time_us"] / reference["device_time_us"]
        if row is not reference:
            _judge(row, _verdicts(mine, its))


def comparable(row: Mapping[str, Any], apart: Container[str] = ()) -> tuple[Any, ...]:
    """Equal for rows whose times may be held against each other. apart: as in `add`."""
    same = tuple(row[k] for k in ("block", "case", "direction", "dtype", "precision", "segment", "timer", "target"))
    return (*same, row["segment"] in apart and worker_of(row["compiler"]) == "xla")


@dataclass(frozen=True)
class Judgement:
    """One row against another. main: by cold device time. word: main's, or DEPENDS; text: what is said of it."""

    main: Verdict
    word: str
    text: str


def between(mine: Rounds, its: Rounds) -> Judgement | None:
    """None where their rounds were not taken side by side, or are too few."""
    return _judgement(_verdicts(mine, its))


def _judgement(verdicts: Mapping[str, Verdict]) -> Judgement | None:
    if (main := verdicts.get(MAIN)) is None:
        return None
    flipped = flip({_SPOKEN[timer]: verdicts[timer] for timer in _SPOKEN if timer in verdicts})
    return Judgement(main, DEPENDS if flipped else main.word, flipped or str(main))


def _verdicts(mine: Rounds, its: Rounds) -> dict[str, Verdict]:
    """By every timer of both; only rounds taken side by side are paired."""
    if mine.processes != its.processes:
        return {}
    found = {}
    for timer in mine.times.keys() & its.times.keys():
        a, b = mine.times[timer], its.times[timer]
        if len(a) == len(b) and (verdict := compare(a, b, mine.processes)):
            found[timer] = verdict
    return found


def _judge(row: dict[str, Any], verdicts: Mapping[str, Verdict]) -> None:
    for timer in TIMERS:
        if timer in verdicts:
            row[f"{timer}_vs_xla"], row[f"{timer}_vs_xla_word"] = verdicts[timer].ratio, verdicts[timer].word
    if found := _judgement(verdicts):
        row["verdict_vs_xla"] = found.text
        row["verdict_vs_xla_low"], row["verdict_vs_xla_high"] = found.main.low, found.main.high
        row["verdict_vs_xla_word"] = found.word


def in_common(a: list[dict[str, Any]], b: list[dict[str, Any]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Pairs of two runs' rows on the same implementation of the same case, where both have a verdict."""
    names = ("block", "case", "dtype", "precision", "direction", "implementation")
    judged = [{tuple(row[name] for name in names): row for row in rows if row["verdict_vs_xla"]} for rows in (a, b)]
    return [(row, judged[1][key]) for key, row in judged[0].items() if key in judged[1]]


def contradictions(pairs: Iterable[tuple[dict[str, Any], dict[str, Any]]]) -> list[str]:
    """Where two runs name opposite winners of the same comparison, in words: of an implementation and the baseline, by
    the same timer."""
    found = []
    for one, other in pairs:
        what = "/".join(str(one[name]) for name in ("block", "case", "dtype", "direction", "implementation"))
        for timer in TIMERS:
            words = [row[f"{timer}_vs_xla_word"] for row in (one, other)]
            if set(words) == {"faster", "slower"}:
                found.append(f"{what}: {words[0]} in the one, {words[1]} in the other, by {_SPOKEN[timer]}")
    return found
