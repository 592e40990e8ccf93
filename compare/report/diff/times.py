"""The change of one record's time between two runs, judged from the rounds of both."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from ...backends import worker_of
from ...measure.clock_calibration import AGREEMENT, disagreement
from ...plan.paired_rounds import device_time_us, measured_phases, round_medians, rounds_of
from ...plan.speedup import LEAST_ROUNDS, Sample, Speedup, compare_runs
from ...plan.timing_modes import MAIN
from ...record.record import Record
from .environment import NOTABLE, ceiling_difference, devices

Word = Literal["faster", "slower", "shorter launch gaps", "longer launch gaps", "tie", "unresolved"]
BUSY = "busy"


@dataclass(frozen=True)
class TimeChange:
    """A record's time before and after.

    before_us, after_us: device time of a call. word: None if the times cannot be compared; `refused` says why.
    speedups: after against before, by timer (a mode's device time, "wall", or "busy": the time in which a kernel ran).
    notes: other differences between the two measurements.
    """

    before_us: float | None
    after_us: float | None
    word: Word | None = None
    speedups: Mapping[str, Speedup] | None = None
    refused: str = ""
    notes: tuple[str, ...] = ()

    @property
    def main(self) -> Speedup | None:
        """The comparison by cold device time."""
        return (self.speedups or {}).get(MAIN)

    @property
    def busy(self) -> Speedup | None:
        """The comparison by the time in which a kernel ran."""
        return (self.speedups or {}).get(BUSY)

    def to_json(self) -> dict[str, Any]:
        return {
            "before_us": self.before_us, "after_us": self.after_us, "word": self.word,
            "refused": self.refused or None, "notes": list(self.notes),
            "ratios": {timer: asdict(speedup) for timer, speedup in (self.speedups or {}).items()},
        }

    @property
    def lost_us(self) -> float:
        """Return how much longer a call takes after than before; 0 if either time is unknown."""
        return 0.0 if self.before_us is None or self.after_us is None else self.after_us - self.before_us


def compare_times(
    a: Record, b: Record, segments: tuple[Mapping[str, Any], Mapping[str, Any]], tolerance: float
) -> TimeChange | None:
    """Compare the times of two records; None if neither was timed. segments: the segment of each in its run.json."""
    before, after = device_time_us(a), device_time_us(b)
    if before is None and after is None:
        return None
    if before is None or after is None:
        return TimeChange(before, after, refused=f"not timed {'before' if before is None else 'after'}")
    if refused := _timers_differ(a, b, segments):
        return TimeChange(before, after, refused=refused)
    earlier, later = _samples(a), _samples(b)
    found = {
        timer: speedup for timer in earlier if timer in later
        if (speedup := compare_runs(later[timer], earlier[timer], tolerance))
    }
    if MAIN not in found:
        return TimeChange(before, after, refused=f"fewer than {LEAST_ROUNDS} rounds")
    return TimeChange(before, after, _word(found[MAIN], found.get(BUSY)), found, notes=_notes(a, b, segments))


def _word(call: Speedup, busy: Speedup | None) -> Word:
    """Return how a time changed: "slower" or "faster" only if the kernels' own time changed.

    Launch gaps vary between runs although nothing changed (docs/diff.md). busy: None if the timer saw no kernels; the
    call's time decides then.
    """
    if busy is None:
        return call.word
    if busy.word in ("faster", "slower") and call.word in (busy.word, "unresolved"):
        return busy.word
    gaps: dict[str, Word] = {"faster": "shorter launch gaps", "slower": "longer launch gaps"}
    return gaps.get(call.word, call.word)


def _timers_differ(a: Record, b: Record, segments: tuple[Mapping[str, Any], Mapping[str, Any]]) -> str:
    timers = [record.measurement.timer if record.measurement else None for record in (a, b)]
    if timers[0] != timers[1]:
        return f"the timers differ: {timers[0]} before, {timers[1]} after"
    clocks = {
        f"{run} {number}": seconds
        for run, segment in enumerate(segments) for number, seconds in enumerate(_clocks(segment, a))
    }
    if (apart := disagreement(clocks)) > AGREEMENT:
        return f"the two runs' clocks differ by {apart:.1%}"
    return ""


def _clocks(segment: Mapping[str, Any], record: Record) -> list[float]:
    """Return the time of the calibration kernel in each worker of the record's backend, in seconds."""
    role, clocks = worker_of(record.compiler), segment.get("clocks")
    timed = clocks.items() if isinstance(clocks, dict) else ()
    return [s for name, s in timed if name.split(" ")[0] == role and isinstance(s, int | float) and s > 0]


def _samples(record: Record) -> dict[str, Sample]:
    rounds = rounds_of(record)
    times = dict(rounds.times)
    if _has_kernel_times(record):
        phases = measured_phases(record)
        times[BUSY] = round_medians(phases[name].busy_time or [] for name in record.case.phases)
    return {timer: Sample(found, rounds.processes) for timer, found in times.items() if all(t > 0 for t in found)}


def _has_kernel_times(record: Record) -> bool:
    """True if the timer recorded each kernel, so that gaps are known."""
    return all(phase.busy_time is not None for phase in measured_phases(record).values())


def _notes(a: Record, b: Record, segments: tuple[Mapping[str, Any], Mapping[str, Any]]) -> tuple[str, ...]:
    notes = []
    if not (_has_kernel_times(a) and _has_kernel_times(b)):
        notes.append("the timer did not record single kernels")
    if (gpus := [sorted(devices(segment)) for segment in segments])[0] != gpus[1]:
        notes.append(f"GPUs differ: {' or '.join(gpus[0]) or '?'}, {' or '.join(gpus[1]) or '?'}")
    if (apart := ceiling_difference(*segments)) > NOTABLE:
        notes.append(f"ceilings differ by up to {apart:.0%}")
    if not all(_clocks(segment, record) for segment, record in zip(segments, (a, b), strict=True)):
        notes.append("the clocks were not compared")
    conditions = [
        [condition for condition in (record.measurement.conditions if record.measurement else []) if condition]
        for record in (a, b)
    ]
    rates = [[condition.sm_mhz for condition in rounds if condition.sm_mhz] for rounds in conditions]
    if not all(rates):
        notes.append("not both runs recorded clock rates")
    elif abs((after := statistics.median(rates[1])) / (before := statistics.median(rates[0])) - 1) > NOTABLE:
        notes.append(f"SM clock: {before:.0f} → {after:.0f} MHz")
    throttled = [sum(bool(condition.throttled) for condition in rounds) for rounds in conditions]
    if throttled[0] != throttled[1]:
        notes.append(f"throttled rounds: {throttled[0]} → {throttled[1]}")
    return tuple(notes)
