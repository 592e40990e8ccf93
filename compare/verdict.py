"""Who is faster, by how much, and whether this run can say so.

What is resampled are rounds, in each of which every implementation of the case was timed, never single samples: samples
of one round share its clocks and its neighbours, and are no independent evidence.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

Word = Literal["faster", "slower", "tie", "unresolved"]

TIE = 0.01  # relative; nobody rewrites a kernel for less
CONFIDENCE = 0.95
LEAST_ROUNDS = 5
_LISTED = 7  # rounds; the 1716 ways to draw as many with replacement are listed, those of more are sampled
_RESAMPLES = 4000


@dataclass(frozen=True)
class Verdict:
    """How A does against B. ratio: A's time over B's; low, high: its interval. resolution: the smallest relative
    effect that this run could have told from a tie."""

    word: Word
    ratio: float
    low: float
    high: float
    resolution: float

    def __str__(self) -> str:
        match self.word:
            case "faster":
                return f"{1 / self.ratio:.2f}x faster, {1 / self.high:.2f} to {1 / self.low:.2f}"
            case "slower":
                return f"{self.ratio:.2f}x slower, {self.low:.2f} to {self.high:.2f}"
            case "tie":
                return f"tie: within {TIE:.0%}"
            case _:
                return f"unresolved: nothing under {self.resolution:.1%} could be seen"


def compare(a: Sequence[float], b: Sequence[float]) -> Verdict | None:
    """The verdict on two implementations from their times in the same rounds; None from fewer than LEAST_ROUNDS.

    The interval is the bootstrap percentile interval of the geometric mean of the rounds' ratios, expanded for few
    rounds (T. Hesterberg, "What Teachers Should Know About the Bootstrap", arXiv 1411.5279): of five normal rounds it
    holds the true ratio in 93% of trials. Faster or slower: the interval lies outside 1 by more than TIE; tie: inside.
    """
    logs = [math.log(x / y) for x, y in zip(a, b, strict=True)]
    if len(logs) < LEAST_ROUNDS:
        return None
    tail = _expanded_tail(len(logs))
    low, high = (math.exp(mean) for mean in _quantiles(sorted(_resampled_means(logs)), tail))
    ratio = math.exp(statistics.fmean(logs))
    return Verdict(_word(low, high), ratio, low, high, TIE + max(high / ratio, ratio / low) - 1)


def _word(low: float, high: float) -> Word:
    if high < 1 / (1 + TIE):
        return "faster"
    if low > 1 + TIE:
        return "slower"
    return "tie" if low > 1 / (1 + TIE) and high < 1 + TIE else "unresolved"


def _expanded_tail(rounds: int) -> float:
    """What to cut off on each side so that few rounds give an interval as wide as Student's."""
    return statistics.NormalDist().cdf(-math.sqrt(rounds / (rounds - 1)) * _student(rounds - 1))


def _student(freedom: int) -> float:
    """Student's t quantile at (1 + CONFIDENCE) / 2 (Abramowitz and Stegun 26.7.5; from 4 degrees on within 0.3%)."""
    z = statistics.NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    return (
        z
        + (z**3 + z) / (4 * freedom)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * freedom**3)
    )


def _resampled_means(logs: list[float]) -> Iterator[tuple[float, float]]:
    """(mean, weight) of resampled rounds: all of them where they can be listed, else as many as are enough, always
    the same."""
    count = len(logs)
    if count > _LISTED:
        generator = random.Random(0)
        for _ in range(_RESAMPLES):
            yield statistics.fmean(generator.choices(logs, k=count)), 1.0
        return
    for drawn in itertools.combinations_with_replacement(range(count), count):
        orders = math.factorial(count)
        for repeats in Counter(drawn).values():
            orders //= math.factorial(repeats)
        yield statistics.fmean(logs[i] for i in drawn), float(orders)


def _quantiles(means: list[tuple[float, float]], tail: float) -> tuple[float, float]:
    """What cuts off `tail` of the weight at either end."""
    cut = tail * sum(weight for _, weight in means)

    def first_beyond(ordered: list[tuple[float, float]]) -> float:
        below = itertools.accumulate(weight for _, weight in ordered)
        return next(mean for (mean, _), sofar in zip(ordered, below, strict=True) if sofar > cut)

    return first_beyond(means), first_beyond(means[::-1])
