"""One implementation's times in two runs: what became of them, as far as the rounds of both can tell."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ...measure.clock_calibration import AGREEMENT, disagreement
from ...plan.paired_rounds import call_us, measured_parts, rounds_of
from ...plan.speedup import LEAST_ROUNDS, Sample, Verdict, compare_runs
from ...plan.timing_modes import MAIN
from ...record.record import Record
from .environment import NOTABLE, ceilings_apart, devices

Word = Literal["faster", "slower", "faster between kernels", "slower between kernels", "tie", "unresolved"]
BUSY = "busy"


@dataclass(frozen=True)
class Timing:
    """before_us, after_us: device time of a call. word: None where nothing can be said, for the reason in `refused`.

    verdicts: after against before, by timer (a mode's device time, "wall", "busy": time in which some kernel ran).
    notes: what else differs between the two, to be read beside the ratio.
    """

    before_us: float | None
    after_us: float | None
    word: Word | None = None
    verdicts: Mapping[str, Verdict] | None = None
    refused: str = ""
    notes: tuple[str, ...] = ()

    @property
    def main(self) -> Verdict | None:
        return (self.verdicts or {}).get(MAIN)

    @property
    def busy(self) -> Verdict | None:
        return (self.verdicts or {}).get(BUSY)

    @property
    def lost_us(self) -> float:
        """By how much a call takes longer now; 0 where either time is not known."""
        return 0.0 if self.before_us is None or self.after_us is None else self.after_us - self.before_us


def judge(
    a: Record, b: Record, segments: tuple[Mapping[str, Any], Mapping[str, Any]], tolerance: float
) -> Timing | None:
    """None where neither was timed. segments: of either record, as in its run.json."""
    before, after = call_us(a), call_us(b)
    if before is None and after is None:
        return None
    if before is None or after is None:
        return Timing(before, after, refused=f"not timed {'before' if before is None else 'after'}")
    if refused := _unequal_timers(a, b, segments):
        return Timing(before, after, refused=refused)
    sides = _samples(a), _samples(b)
    found = {
        timer: verdict for timer in sides[0] if timer in sides[1]
        if (verdict := compare_runs(sides[1][timer], sides[0][timer], tolerance))
    }
    if MAIN not in found:
        return Timing(before, after, refused=f"fewer than {LEAST_ROUNDS} rounds")
    return Timing(before, after, word(found[MAIN], found.get(BUSY)), found, notes=_notes(a, b, segments))


def word(call: Verdict, busy: Verdict | None) -> Word:
    """Kernels that take longer make a call slower; one whose kernels take what they took became slower between them,
    where the host launches: seen from run to run with nothing changed (docs/diff.md). busy: None where no single
    kernels were seen; then the call's word stands."""
    if busy is None:
        return call.word
    if busy.word in ("faster", "slower") and call.word in (busy.word, "unresolved"):
        return busy.word
    if call.word == "faster":
        return "faster between kernels"
    if call.word == "slower":
        return "slower between kernels"
    return call.word


def _unequal_timers(a: Record, b: Record, segments: tuple[Mapping[str, Any], Mapping[str, Any]]) -> str:
    timers = [(record.measurement or {}).get("timer") for record in (a, b)]
    if timers[0] != timers[1]:
        return f"timed by {timers[0]} before, by {timers[1]} after"
    clocks = {
        f"{side} {number}": seconds
        for side, segment in enumerate(segments) for number, seconds in enumerate(_clocks(segment, a))
    }
    if (apart := disagreement(clocks)) > AGREEMENT:
        return f"the two runs' clocks differ by {apart:.1%}"
    return ""


def _clocks(segment: Mapping[str, Any], record: Record) -> list[float]:
    """What the clocks of the record's framework made of the calibration kernel, in every lane."""
    role = "xla" if record.compiler.startswith("xla") else "torch"
    clocks = segment.get("clocks")
    found = clocks.items() if isinstance(clocks, dict) else ()
    return [s for name, s in found if name.split(" ")[0] == role and isinstance(s, int | float) and s > 0]


def _samples(record: Record) -> dict[str, Sample]:
    rounds = rounds_of(record)
    times = dict(rounds.times)
    if _sees_kernels(record):
        parts = measured_parts(record)
        medians = [[statistics.median(found) for found in parts[part]["busy_time"]] for part in record.case.parts]
        times[BUSY] = [sum(each) for each in zip(*medians, strict=True)]
    return {timer: Sample(found, rounds.processes) for timer, found in times.items() if all(t > 0 for t in found)}


def _sees_kernels(record: Record) -> bool:
    """Whether its timer told kernels from the gaps between them."""
    return all(part["busy_time"] is not None for part in measured_parts(record).values())


def _notes(a: Record, b: Record, segments: tuple[Mapping[str, Any], Mapping[str, Any]]) -> tuple[str, ...]:
    notes = []
    if not (_sees_kernels(a) and _sees_kernels(b)):
        notes.append("its kernels are not told from the gaps between them")
    if (gpus := [sorted(devices(segment)) for segment in segments])[0] != gpus[1]:
        notes.append(f"GPUs differ: {' or '.join(gpus[0]) or '?'}, {' or '.join(gpus[1]) or '?'}")
    if (apart := ceilings_apart(*segments)) > NOTABLE:
        notes.append(f"ceilings differ by up to {apart:.0%}")
    if not all(_clocks(segment, record) for segment, record in zip(segments, (a, b), strict=True)):
        notes.append("clocks not held against each other")
    before, after = _median_clock(a), _median_clock(b)
    if before is None or after is None:
        notes.append("clock rates not recorded in both")
    elif abs(after / before - 1) > NOTABLE:
        notes.append(f"SM clock {before:.0f} → {after:.0f} MHz")
    throttled = [_throttled(record) for record in (a, b)]
    if any(throttled) and throttled[0] != throttled[1]:
        notes.append(f"throttled rounds {throttled[0]} → {throttled[1]}")
    return tuple(notes)


def _conditions(record: Record) -> list[Mapping[str, Any]]:
    return [found for found in (record.measurement or {}).get("conditions") or [] if isinstance(found, dict)]


def _median_clock(record: Record) -> float | None:
    rates = [found["sm_mhz"] for found in _conditions(record) if found.get("sm_mhz")]
    return float(statistics.median(rates)) if rates else None


def _throttled(record: Record) -> int:
    return sum(bool(found.get("throttled")) for found in _conditions(record))
