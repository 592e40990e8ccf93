"""Who is faster, by how much, and whether this run can say so.

What is resampled are rounds (in each of which every implementation of the case was timed) and worker restarts, never
single samples: samples of one round share its clocks and its neighbours, and are no independent evidence.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

Word = Literal["faster", "slower", "tie", "unresolved"]
Restarts = Sequence[Sequence[float]]  # restart -> round -> seconds: the median of the round's samples

TIE = 0.01  # relative; nobody rewrites a kernel for less
CONFIDENCE = 0.95
_RESAMPLES = 20_000


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
        speed, least, most = 1 / self.ratio, 1 / self.high, 1 / self.low
        match self.word:
            case "faster":
                return f"{speed:.2f}x faster, {least:.2f} to {most:.2f}"
            case "slower":
                return f"{self.ratio:.2f}x slower, {self.low:.2f} to {self.high:.2f}"
            case "tie":
                return f"tie: within {TIE:.0%}"
            case _:
                return f"unresolved: nothing under {self.resolution:.1%} could be seen"


def compare(a: Restarts, b: Restarts) -> Verdict | None:
    """The verdict on two implementations that were timed in the same rounds; None from fewer than three rounds.

    The interval is the bootstrap percentile interval of the geometric mean of the rounds' ratios, expanded for few
    rounds (T. Hesterberg, "What Teachers Should Know About the Bootstrap", arXiv 1411.5279, section 3.2.1). Rounds are
    resampled within resampled restarts. Faster or slower: the interval lies outside 1 by more than TIE; tie: inside.
    """
    logs = [
        [math.log(x / y) for x, y in zip(rounds_a, rounds_b, strict=True)]
        for rounds_a, rounds_b in zip(a, b, strict=True)
        if rounds_a
    ]
    rounds = sum(map(len, logs))
    if rounds < 3:
        return None
    means = _resampled_means(logs)
    tail = _expanded_tail(rounds)
    low, high = (math.exp(float(np.quantile(means, q))) for q in (tail, 1 - tail))
    ratio = math.exp(statistics.fmean(itertools.chain.from_iterable(logs)))
    return Verdict(_word(low, high), ratio, low, high, TIE + max(high / ratio, ratio / low) - 1)


def _word(low: float, high: float) -> Word:
    if high < 1 / (1 + TIE):
        return "faster"
    if low > 1 + TIE:
        return "slower"
    return "tie" if low > 1 / (1 + TIE) and high < 1 + TIE else "unresolved"


def _expanded_tail(rounds: int) -> float:
    """What to cut off on each side so that few rounds give an interval as wide as Student's."""
    t = float(stdtrit(rounds - 1, (1 + CONFIDENCE) / 2))
    return statistics.NormalDist().cdf(-math.sqrt(rounds / (rounds - 1)) * t)


def _resampled_means(logs: list[list[float]]) -> NDArray[np.float64]:
    """Means of resampled rounds: all of them where they can be listed, else as many as are enough, always the same."""
    if len(logs) == 1 and len(logs[0]) <= 5:
        return np.array([statistics.fmean(draw) for draw in itertools.product(logs[0], repeat=len(logs[0]))])
    generator = np.random.default_rng(0)
    total = np.zeros(_RESAMPLES)
    for _ in logs:
        which = generator.integers(len(logs), size=_RESAMPLES)
        drawn = np.empty(_RESAMPLES)
        for restart, values in enumerate(logs):
            mine = which == restart
            draws = generator.integers(len(values), size=(int(mine.sum()), len(values)))
            drawn[mine] = np.asarray(values)[draws].mean(axis=1)
        total += drawn
    means: NDArray[np.float64] = total / len(logs)
    return means
