"""The search accepts a configuration only if it beats the present one by more than the noise. A fake timer decides."""

from __future__ import annotations

import math
import random
from collections import Counter

from xlafuse.triton_side.tuning.search import search


class Timer:
    """Times with noise, relative to the true ones."""

    def __init__(self, noise: float = 0.0, **true: float) -> None:
        self.true, self.noise, self.random = true, noise, random.Random(0)
        self.accurate: Counter[str] = Counter()

    def __call__(self, config: str, accurate: bool) -> float:
        self.accurate[config] += accurate
        return self.true[config] * (1 + self.noise * self.random.uniform(-1, 1))


def test_the_fastest_is_taken() -> None:
    found = search("present", ["a", "b", "c"], Timer(present=10.0, a=9.0, b=8.0, c=20.0))
    assert (found.config, found.seconds, found.before) == ("b", 8.0, 10.0)


def test_the_present_one_stays_without_a_faster_one() -> None:
    found = search("present", ["a", "b"], Timer(present=10.0, a=11.0, b=10.5))
    assert (found.config, found.seconds, found.before) == ("present", 10.0, 10.0)
    assert search("present", [], Timer(present=10.0)).config == "present"


def test_less_than_a_percent_is_a_tie() -> None:
    assert search("present", ["a"], Timer(present=10.0, a=9.95)).config == "present"


def test_noise_hardly_ever_wins() -> None:
    wins = 0
    for seed in range(400):
        timer = Timer(noise=0.1, present=10.0, **{f"c{i}": 10.0 for i in range(40)})
        timer.random.seed(seed)
        wins += search("present", [f"c{i}" for i in range(40)], timer).config != "present"
    assert wins <= 2  # 4 finalists with one chance in 3432 each


def test_a_gain_beyond_the_noise_is_found_in_it() -> None:
    found = search("present", ["a", "b"], Timer(noise=0.02, present=10.0, a=9.0, b=10.0))
    assert found.config == "a"


def test_a_candidate_that_cannot_run_is_never_taken() -> None:
    assert search("present", ["a", "b"], Timer(present=10.0, a=math.inf, b=9.0)).config == "b"
    assert search("present", ["a"], Timer(present=10.0, a=math.inf)).config == "present"


def test_a_present_one_that_cannot_run_is_replaced() -> None:
    found = search("present", ["a", "b"], Timer(present=math.inf, a=9.0, b=10.0))
    assert found.config == "a" and math.isinf(found.before)


def test_slow_candidates_are_timed_only_roughly() -> None:
    timer = Timer(present=10.0, **{f"c{i}": 10.0 + i for i in range(30)})
    search("present", [f"c{i}" for i in range(30)], timer)
    assert timer.accurate["c0"] and not timer.accurate["c29"]
