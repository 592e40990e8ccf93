"""Speedups with intervals: which of two implementations is faster, by how much, and how certain that is.

Each round times every implementation of the case. Intervals come from resampled rounds, not samples: the samples of one
round share its clock rate, so they are not independent. Where workers were restarted between rounds, processes are
resampled, and the rounds within each: the rounds of one process share its autotuned configuration.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from operator import itemgetter
from typing import Literal

Word = Literal["faster", "slower", "tie", "unresolved"]
DEPENDS = "depends on the timer"

TIE = 0.01  # relative; a smaller gain does not pay for another kernel
CONFIDENCE = 0.95
LEAST_ROUNDS = 5
_MOST_LISTED = 1716  # all ways to draw 7 rounds of 7 with replacement; where there are more, _RESAMPLES are drawn
_RESAMPLES = 4000
_NORMAL = statistics.NormalDist().inv_cdf((1 + CONFIDENCE) / 2)


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
    logs = [math.log(x / y) for x, y in zip(a, b, strict=True)]
    if len(logs) < LEAST_ROUNDS:
        return None
    groups = _by_process(logs, processes)
    low, high = map(math.exp, _interval(logs) if len(groups) == 1 else _interval_of_processes(list(groups.values())))
    ratio = math.exp(statistics.fmean(map(statistics.fmean, groups.values())))
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
    differences = [x - y for x, y in zip(a, b, strict=True)]
    if len(differences) < LEAST_ROUNDS:
        return None
    return Saving(statistics.fmean(differences), *_interval(differences))


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
    if min(len(a.times), len(b.times)) < LEAST_ROUNDS:
        return None
    (above, spread_above), (below, spread_below) = _spread(a), _spread(b)
    drawn = zip(_draws(spread_above, 0), _draws(spread_below, 1), strict=True)
    low, high = map(math.exp, _quantiles(sorted((x - y, 1.0) for x, y in drawn), (1 - CONFIDENCE) / 2))
    ratio = math.exp(above - below)
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


def _interval(values: list[float]) -> tuple[float, float]:
    return _quantiles(_resampled(values), _expanded_tail(len(values)))


def _interval_of_processes(groups: list[list[float]]) -> tuple[float, float]:
    """The interval from processes drawn with replacement, and rounds within each, widened for few draws."""
    low, high = _quantiles(_resampled_processes(groups), (1 - CONFIDENCE) / 2)
    middle = statistics.fmean(map(statistics.fmean, groups))
    stretch = _stretch(len(groups))
    return middle - (middle - low) * stretch, middle + (high - middle) * stretch


def _resampled_processes(groups: list[list[float]]) -> list[tuple[float, float]]:
    within = [
        (mean, weight / len(group) ** len(group))
        for group in groups for mean, weight in _resampled(group)
    ]
    return _resampled_means(within, len(groups))


def _stretch(draws: int) -> float:
    """Width of Student's interval over that of the bootstrap, for few observations."""
    freedom = draws - 1
    return _student(freedom) * math.sqrt((freedom + 1) / freedom) / _NORMAL


def _spread(sample: Sample) -> tuple[float, list[tuple[float, float]]]:
    """The logarithm of a run's mean, and (value, weight) of its resampled means."""
    groups = list(_by_process([math.log(time) for time in sample.times], sample.processes).values())
    middle = statistics.fmean(map(statistics.fmean, groups))
    means = _resampled(groups[0]) if len(groups) == 1 else _resampled_processes(groups)
    stretch = _stretch(len(groups[0] if len(groups) == 1 else groups))
    return middle, [(middle + (mean - middle) * stretch, weight) for mean, weight in means]


def _draws(points: list[tuple[float, float]], seed: int) -> list[float]:
    values, weights = [value for value, _ in points], [weight for _, weight in points]
    return random.Random(seed).choices(values, weights, k=_RESAMPLES)


def _by_process(logs: Sequence[float], processes: Sequence[int]) -> dict[int, list[float]]:
    groups: dict[int, list[float]] = {}
    for process, log in zip(processes or [0] * len(logs), logs, strict=True):
        groups.setdefault(process, []).append(log)
    return groups


def _expanded_tail(rounds: int) -> float:
    """The share to cut off on each side so that few rounds give an interval as wide as Student's."""
    return statistics.NormalDist().cdf(-math.sqrt(rounds / (rounds - 1)) * _student(rounds - 1))


def _student(freedom: int) -> float:
    """Student's t quantile at (1 + CONFIDENCE) / 2: exact for 1 and 2 degrees, else Abramowitz and Stegun 26.7.5,
    within 0.8% for 3 and 0.3% from 4 on."""
    if freedom == 1:
        return math.tan(math.pi * CONFIDENCE / 2)
    if freedom == 2:
        return CONFIDENCE * math.sqrt(2 / (1 - CONFIDENCE**2))
    z = _NORMAL
    return (
        z
        + (z**3 + z) / (4 * freedom)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * freedom**3)
    )


def _resampled(logs: list[float]) -> list[tuple[float, float]]:
    """Means of as many draws with replacement as there are rounds."""
    return _resampled_means([(log, 1.0) for log in logs], len(logs))


def _resampled_means(points: list[tuple[float, float]], draws: int) -> list[tuple[float, float]]:
    """(mean, weight) of draws with replacement from weighted points, in order of the mean.

    All ways to draw are listed where there are at most _MOST_LISTED, else _RESAMPLES are drawn from a fixed seed.
    """
    values, weights = [value for value, _ in points], [weight for _, weight in points]
    if math.comb(len(points) + draws - 1, draws) > _MOST_LISTED:
        generator = random.Random(0)
        return sorted((sum(generator.choices(values, weights, k=draws)) / draws, 1.0) for _ in range(_RESAMPLES))
    if draws == 1:
        return sorted(points)
    ways = _ways_to_draw(len(points), draws)
    if set(weights) == {1.0}:  # rounds; without the products of weights it takes two thirds of the time
        return sorted([(sum(drawn(values)) / draws, float(orders)) for drawn, orders in ways])
    return sorted([(sum(drawn(values)) / draws, orders * math.prod(drawn(weights))) for drawn, orders in ways])


_Take = Callable[[list[float]], tuple[float, ...]]


@cache
def _ways_to_draw(points: int, draws: int) -> list[tuple[_Take, int]]:
    """(a function that takes the drawn values, the number of their orders) for each way to draw two or more values.
    """
    ways: list[tuple[_Take, int]] = []
    for drawn in itertools.combinations_with_replacement(range(points), draws):
        orders = math.factorial(draws)
        for repeats in Counter(drawn).values():
            orders //= math.factorial(repeats)
        ways.append((itemgetter(*drawn), orders))
    return ways


def _quantiles(means: list[tuple[float, float]], tail: float) -> tuple[float, float]:
    """The values that cut off `tail` of the weight at either end."""
    cut = tail * sum(weight for _, weight in means)

    def first_beyond(ordered: list[tuple[float, float]]) -> float:
        below = itertools.accumulate(weight for _, weight in ordered)
        return next(mean for (mean, _), sofar in zip(ordered, below, strict=True) if sofar > cut)

    return first_beyond(means), first_beyond(means[::-1])
