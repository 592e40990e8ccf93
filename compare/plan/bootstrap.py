"""Intervals of means by the bootstrap: means of values drawn with replacement, and their quantiles.

Values come in groups, such as the rounds of one process. Several groups are drawn with replacement, too.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

CONFIDENCE = 0.95
_MOST_LISTED = 1716  # all ways to draw 7 values of 7 with replacement; where there are more, _RESAMPLES are drawn
_RESAMPLES = 4000
_TAIL = (1 - CONFIDENCE) / 2
_NORMAL = statistics.NormalDist().inv_cdf((1 + CONFIDENCE) / 2)

Array = np.ndarray[Any, Any]
Groups = Sequence[Sequence[float]]


@dataclass(frozen=True)
class _Means:
    """Resampled means, from the lowest, and their weights."""

    means: Array
    weights: Array

    def quantiles(self, tail: float) -> tuple[float, float]:
        """Return the means that cut off `tail` of the weight at either end."""
        cut = tail * np.cumsum(self.weights)[-1]
        low, high = (np.argmax(np.cumsum(weights) > cut) for weights in (self.weights, self.weights[::-1]))
        return float(self.means[low]), float(self.means[::-1][high])

    def stretched(self, middle: float, factor: float) -> _Means:
        return _Means(middle + (self.means - middle) * factor, self.weights)


def mean(groups: Groups) -> float:
    """Return the mean of the groups' means."""
    return statistics.fmean(map(statistics.fmean, groups))


def interval(groups: Groups) -> tuple[float, float]:
    """Return the interval of the mean, widened for few draws.

    One group: the percentile interval, its tails as wide as Student's. Several: a two-level bootstrap, each group one
    observation, stretched to the width of Student's interval.
    """
    resampled = _resampled(groups)
    if len(groups) == 1:
        return resampled.quantiles(_expanded_tail(len(groups[0])))
    return resampled.stretched(mean(groups), _stretch(len(groups))).quantiles(_TAIL)


def interval_of_difference(a: Groups, b: Groups) -> tuple[float, float]:
    """Return the interval of the difference of two means, each drawn by itself and stretched for few draws."""
    drawn_a, drawn_b = (_drawn_means(groups, seed) for seed, groups in enumerate((a, b)))
    return _Means(np.sort(drawn_a - drawn_b), np.ones(_RESAMPLES)).quantiles(_TAIL)


def _drawn_means(groups: Groups, seed: int) -> Array:
    draws = len(groups[0] if len(groups) == 1 else groups)
    resampled = _resampled(groups).stretched(mean(groups), _stretch(draws))
    return resampled.means[_draw(resampled.weights, _RESAMPLES, seed)]


def _resampled(groups: Groups) -> _Means:
    """Return means of as many draws as there are groups, of means of as many draws as each group has values."""
    within = [_means_of_draws(np.array(group), np.ones(len(group)), len(group)) for group in groups]
    if len(groups) == 1:
        return within[0]
    weights = [found.weights / len(group) ** len(group) for found, group in zip(within, groups, strict=True)]
    return _means_of_draws(np.concatenate([found.means for found in within]), np.concatenate(weights), len(groups))


def _means_of_draws(values: Array, weights: Array, draws: int) -> _Means:
    """Return means of draws with replacement from weighted values.

    All ways to draw are listed where there are at most _MOST_LISTED, else _RESAMPLES are drawn from a fixed seed.
    """
    if math.comb(len(values) + draws - 1, draws) > _MOST_LISTED:
        drawn = values[_draw(weights, (_RESAMPLES, draws), 0)]
        weights = np.ones(_RESAMPLES)
    else:
        ways, orders = _ways_to_draw(len(values), draws)
        drawn = values[ways]
        weights = orders * np.cumprod(weights[ways], axis=1)[:, -1]
    means = np.cumsum(drawn, axis=1)[:, -1] / draws  # adds in order on every machine, unlike np.sum
    order = np.lexsort((weights, means))
    return _Means(means[order], weights[order])


@cache
def _ways_to_draw(values: int, draws: int) -> tuple[Array, Array]:
    """Return the drawn places of each way to draw, and the number of its orders."""
    ways = list(itertools.combinations_with_replacement(range(values), draws))
    orders = [
        math.factorial(draws) // math.prod(map(math.factorial, Counter(way).values())) for way in ways
    ]
    return np.array(ways), np.array(orders, dtype=float)


def _draw(weights: Array, shape: int | tuple[int, int], seed: int) -> Array:
    """Return places drawn by weight. numpy keeps the stream of RandomState the same in all versions."""
    below = np.cumsum(weights)
    places = np.searchsorted(below, np.random.RandomState([seed]).random_sample(shape) * below[-1], side="right")
    return np.minimum(places, len(weights) - 1)


def _stretch(draws: int) -> float:
    """Width of Student's interval over that of the bootstrap, for few observations."""
    freedom = draws - 1
    return _student(freedom) * math.sqrt((freedom + 1) / freedom) / _NORMAL


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
