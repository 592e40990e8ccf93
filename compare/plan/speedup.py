"""Speedups with intervals: which of two implementations is faster, by how much, and how certain that is.

Each round times every implementation of the case. Intervals come from resampled rounds, not samples: the samples of one
round share its clock rate, so they are not independent. Where workers were restarted between rounds, processes are
resampled, and the rounds within each: the rounds of one process share its autotuned configuration.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Word = Literal["faster", "slower", "tie", "unresolved"]
DEPENDS = "depends on the timer"

TIE = 0.01  # relative; a smaller gain does not pay for another kernel
LEAST_ROUNDS = 5


@dataclass(frozen=True)
class Speedup:
    """One implementation A against another, B.

    ratio: A's time over B's. low, high: its interval. resolution: the smallest relative difference that this run can
    tell from a tie. tie: the largest relative difference that counts as a tie.
    """

    word: Word
    ratio: float
    low: float
    high: float
    resolution: float
    tie: float = TIE

    def __str__(self) -> str:
        match self.word:
            case "faster":
                return f"{self.effect}, {1 / self.high:.2f} to {1 / self.low:.2f}"
            case "slower":
                return f"{self.effect}, {self.low:.2f} to {self.high:.2f}"
            case "tie":
                return f"tie: within {100 * self.tie:g}%"
            case _:
                return f"unresolved: nothing under {self.resolution:.1%} could be seen"

    @property
    def effect(self) -> str:
        """The ratio in words, without the interval."""
        return f"{1 / self.ratio:.2f}x faster" if self.ratio < 1 else f"{self.ratio:.2f}x slower"


def compare(a: Sequence[float], b: Sequence[float], processes: Sequence[int] = ()) -> Speedup | None:
    """Return the speedup from two implementations' times in the same rounds; None for fewer than LEAST_ROUNDS.

    processes: the number of each round's process; empty: all rounds in one process.

    Within one process, the interval is the bootstrap percentile interval of the geometric mean of the rounds' ratios,
    expanded for few rounds (T. Hesterberg, "What Teachers Should Know About the Bootstrap", arXiv 1411.5279). With five
    normal rounds it holds the true ratio in 93% of trials. With several processes, each counts as one observation, and
    the interval is that of a two-level bootstrap, widened as Student's for so few. The word is faster or slower where
    the interval lies outside 1 by more than TIE, and tie where it lies within TIE.
    """
    from . import bootstrap

    logs = [math.log(x / y) for x, y in zip(a, b, strict=True)]
    if len(logs) < LEAST_ROUNDS:
        return None
    groups = _by_process(logs, processes)
    low, high = map(math.exp, bootstrap.interval(groups))
    ratio = math.exp(bootstrap.mean(groups))
    return Speedup(_word(low, high), ratio, low, high, TIE + max(high / ratio, ratio / low) - 1)


@dataclass(frozen=True)
class Saving:
    """The mean difference of two times, and its interval, in the times' unit."""

    mean: float
    low: float
    high: float


def saving(a: Sequence[float], b: Sequence[float]) -> Saving | None:
    """Return how much shorter `b` is than `a` in the same rounds of one process; None for fewer than LEAST_ROUNDS.

    The interval is as in `compare`, of differences in place of logarithms of ratios.
    """
    from . import bootstrap

    differences = [x - y for x, y in zip(a, b, strict=True)]
    if len(differences) < LEAST_ROUNDS:
        return None
    return Saving(statistics.fmean(differences), *bootstrap.interval([differences]))


@dataclass(frozen=True)
class Sample:
    """One run's times of a call by round, and the number of each round's process; empty: all in one process."""

    times: Sequence[float]
    processes: Sequence[int] = ()


def compare_runs(a: Sample, b: Sample, tie: float) -> Speedup | None:
    """Return the speedup of run `a` against run `b`; None where either has fewer than LEAST_ROUNDS.

    Two runs share no rounds. Each run's geometric mean is resampled by itself, as in `compare`, and widened for few
    draws. The interval is that of the ratios of independently drawn means. It includes drift between the rounds of a
    run. It excludes differences between runs, as of machine, temperature or process: `tie` must allow for them. With
    five normal rounds each, the interval holds the true ratio in 97% of trials.
    """
    from . import bootstrap

    if min(len(a.times), len(b.times)) < LEAST_ROUNDS:
        return None
    groups_a, groups_b = (_by_process([math.log(time) for time in run.times], run.processes) for run in (a, b))
    low, high = map(math.exp, bootstrap.interval_of_difference(groups_a, groups_b))
    ratio = math.exp(bootstrap.mean(groups_a) - bootstrap.mean(groups_b))
    low, high = min(low, ratio), max(high, ratio)
    return Speedup(_word(low, high, tie), ratio, low, high, tie + max(high / ratio, ratio / low) - 1, tie)


def contradiction(speedups: Mapping[str, Speedup]) -> str | None:
    """Return, in words, the two timers that contradict each other most: A is faster by one and slower by the other.

    None where no two timers contradict each other. A tie, or an unresolved comparison, contradicts none.
    """
    faster = {timer: found for timer, found in speedups.items() if found.word == "faster"}
    slower = {timer: found for timer, found in speedups.items() if found.word == "slower"}
    if not faster or not slower:
        return None
    ends = [min(faster.items(), key=lambda of: of[1].ratio), max(slower.items(), key=lambda of: of[1].ratio)]
    return f"{DEPENDS}: " + ", ".join(f"{speedup.effect} by {timer}" for timer, speedup in ends)


def _word(low: float, high: float, tie: float = TIE) -> Word:
    if high < 1 / (1 + tie):
        return "faster"
    if low > 1 + tie:
        return "slower"
    return "tie" if low > 1 / (1 + tie) and high < 1 + tie else "unresolved"


def _by_process(logs: Sequence[float], processes: Sequence[int]) -> list[list[float]]:
    groups: dict[int, list[float]] = {}
    for process, log in zip(processes or [0] * len(logs), logs, strict=True):
        groups.setdefault(process, []).append(log)
    return list(groups.values())
