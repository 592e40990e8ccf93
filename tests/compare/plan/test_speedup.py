"""Speedups: equal times are ties, planted slowdowns are found, and few noisy rounds are unresolved."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from full_marks import full
from hypothesis import given
from hypothesis import strategies as st

from xlafuse.compare.plan.bootstrap import _student
from xlafuse.compare.plan.speedup import Sample, Speedup, compare, compare_runs, contradiction

Times = st.floats(1e-6, 1e-2)


def rounds(generator: random.Random, seconds: float, noise: float, count: int = 5) -> list[float]:
    return [seconds * generator.gauss(1, noise) for _ in range(count)]


def test_a_report_read_again_has_the_same_intervals() -> None:
    """The draws are the same with every version of Python and numpy."""
    a = [1.00, 1.02, 0.98, 1.05, 0.97, 1.01, 1.03, 0.99]
    b = [1.10, 1.09, 1.12, 1.08, 1.11, 1.13, 1.07, 1.10]
    found = [
        compare(a[:5], b[:5]), compare(a, b), compare(a, b, [0, 0, 0, 1, 1, 1, 2, 2]),
        compare_runs(Sample(a), Sample(b), 0.02),
    ]
    assert [(speedup.low, speedup.high) for speedup in found if speedup] == [
        pytest.approx(ends, rel=1e-12) for ends in (
            (0.8740989830933057, 0.9648219375311171), (0.8855958282556304, 0.9489714402786775),
            (0.8526133982123801, 0.9919066311078497), (0.8900327649503131, 0.939186754661568),
        )
    ]


@pytest.mark.parametrize(
    ("count", "trials", "noise", "processes"),
    [(5, 300, 0.003, None), full(10, 100, 0.003, None), (6, 100, 0.002, [0, 0, 1, 1, 2, 2])],
)
def test_identical_code_seldom_wins_and_three_percent_is_found(
    count: int, trials: int, noise: float, processes: list[int] | None
) -> None:
    generator = random.Random(0)
    same, slowed = Counter[str](), Counter[str]()
    for _ in range(trials):
        base = rounds(generator, 1e-4, noise, count)
        for words, seconds in ((same, 1e-4), (slowed, 1.03e-4)):
            verdict = compare(rounds(generator, seconds, noise, count), base, processes)
            assert verdict
            words[verdict.word] += 1
    assert same["tie"] + same["unresolved"] >= 0.98 * trials
    assert slowed["slower"] >= 0.95 * trials


def test_the_interval_holds_the_true_ratio_as_often_as_it_says() -> None:
    generator = random.Random(2)
    held = 0
    for _ in range(1000):
        verdict = compare(rounds(generator, 1.05e-4, 0.01), rounds(generator, 1e-4, 0.01))
        assert verdict
        held += verdict.low <= 1.05 <= verdict.high
    assert held >= 0.92 * 1000  # as the docstring of compare says


def test_an_unresolved_comparison_names_the_smallest_visible_difference() -> None:
    generator = random.Random(1)
    verdict = compare(rounds(generator, 1e-4, 0.05), rounds(generator, 1e-4, 0.05))
    assert verdict and verdict.word == "unresolved" and verdict.resolution > 0.03
    assert f"{verdict.resolution:.1%}" in str(verdict)


def test_words() -> None:
    base = [1.0, 1.01, 0.99, 1.0, 1.0]
    half = [x / 2 for x in base]
    assert str(compare(half, base)) == "2.00x faster, 2.00 to 2.00"
    assert str(compare(base, half)) == "2.00x slower, 2.00 to 2.00"
    assert str(compare(base, base)) == "tie: within 1%"
    assert compare([1.0] * 4, [2.0] * 4) is None  # four rounds are too few


@pytest.mark.parametrize(("between", "within"), [(0.0, 0.003), (0.003, 0.003), (0.01, 0.003), (0.005, 0.001)])
def test_the_interval_of_several_processes_holds_the_true_ratio(between: float, within: float) -> None:
    """The interval holds for every share of noise between processes, and for three processes."""
    generator, held = random.Random(3), 0
    processes = [0, 0, 1, 1, 2, 2]

    def times(seconds: float) -> list[float]:
        offsets = [generator.gauss(1, between) for _ in range(3)]
        return [seconds * offsets[process] * generator.gauss(1, within) for process in processes]

    for _ in range(200):
        verdict = compare(times(1.05e-4), times(1e-4), processes)
        assert verdict
        held += verdict.low <= 1.05 <= verdict.high
    assert held >= 0.93 * 200


def test_one_process_gives_the_same_interval_as_none() -> None:
    a, b = [1.0, 1.01, 1.02, 1.0, 0.99], [1.1, 1.1, 1.11, 1.1, 1.08]
    assert compare(a, b, [0] * 5) == compare(a, b) == compare(a, b, [3] * 5)


def test_fewer_processes_give_a_wider_interval() -> None:
    generator = random.Random(5)
    a, b = rounds(generator, 1.05e-4, 0.003, 6), rounds(generator, 1e-4, 0.003, 6)
    widths = []
    for processes in ([0] * 6, [0, 0, 1, 1, 2, 2], [0, 0, 0, 1, 1, 1]):
        verdict = compare(a, b, processes)
        assert verdict
        widths.append(verdict.high - verdict.low)
    assert widths == sorted(widths)


def test_a_contradiction_names_the_two_timers_furthest_apart() -> None:
    def by(word: Any, ratio: float) -> Speedup:
        return Speedup(word, ratio, ratio, ratio, 0.01)

    assert contradiction({"cold": by("faster", 0.7), "warm": by("faster", 0.9), "graph": by("tie", 1.0)}) is None
    assert contradiction({"cold": by("faster", 0.7), "wall": by("unresolved", 1.3)}) is None
    assert contradiction({}) is None
    found = contradiction({"warm": by("slower", 1.2), "cold": by("faster", 0.7), "wall": by("slower", 1.1)})
    assert found == "depends on the timer: 1.43x faster by cold, 1.20x slower by warm"


@pytest.mark.parametrize(("freedom", "quantile"), [(1, 12.706), (2, 4.303), (4, 2.776), (9, 2.262), (30, 2.042)])
def test_student(freedom: int, quantile: float) -> None:
    assert _student(freedom) == pytest.approx(quantile, rel=0.003)


@given(st.lists(st.tuples(Times, Times), min_size=5, max_size=9))
def test_swapping_the_two_inverts_the_speedup(pairs: list[tuple[float, float]]) -> None:
    a, b = [x for x, _ in pairs], [y for _, y in pairs]
    there, back = compare(a, b), compare(b, a)
    assert there and back and there.low <= there.ratio * (1 + 1e-9) and there.ratio <= there.high * (1 + 1e-9)
    assert there.ratio == pytest.approx(1 / back.ratio)
    if len(pairs) <= 7:  # listed, not sampled
        assert there.low == pytest.approx(1 / back.high) and there.high == pytest.approx(1 / back.low)
