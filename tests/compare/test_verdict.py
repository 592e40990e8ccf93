"""Verdicts: ties are ties, planted slowdowns are found, and few noisy rounds decide nothing."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compare.verdict import _student, compare

Times = st.floats(1e-6, 1e-2)


def rounds(generator: random.Random, seconds: float, noise: float, count: int = 5) -> list[float]:
    return [seconds * generator.gauss(1, noise) for _ in range(count)]


@pytest.mark.parametrize("count", [5, 10])
def test_identical_code_seldom_wins_and_three_percent_is_found(count: int) -> None:
    generator = random.Random(0)
    same, slowed = Counter[str](), Counter[str]()
    for _ in range(300):
        base = rounds(generator, 1e-4, 0.003, count)
        for words, seconds in ((same, 1e-4), (slowed, 1.03e-4)):
            verdict = compare(rounds(generator, seconds, 0.003, count), base)
            assert verdict
            words[verdict.word] += 1
    assert same["tie"] + same["unresolved"] >= 0.98 * 300
    assert slowed["slower"] >= 0.95 * 300


def test_the_interval_holds_the_true_ratio_as_often_as_it_says() -> None:
    generator = random.Random(2)
    held = 0
    for _ in range(1000):
        verdict = compare(rounds(generator, 1.05e-4, 0.01), rounds(generator, 1e-4, 0.01))
        assert verdict
        held += verdict.low <= 1.05 <= verdict.high
    assert held >= 0.92 * 1000  # as the docstring of compare says


def test_noise_is_said_with_what_it_hides() -> None:
    generator = random.Random(1)
    verdict = compare(rounds(generator, 1e-4, 0.05), rounds(generator, 1e-4, 0.05))
    assert verdict and verdict.word == "unresolved" and verdict.resolution > 0.03
    assert "nothing under" in str(verdict)


def test_words() -> None:
    base = [1.0, 1.01, 0.99, 1.0, 1.0]
    half = [x / 2 for x in base]
    assert str(compare(half, base)) == "2.00x faster, 2.00 to 2.00"
    assert str(compare(base, half)) == "2.00x slower, 2.00 to 2.00"
    assert str(compare(base, base)) == "tie: within 1%"


def test_four_rounds_are_no_evidence() -> None:
    assert compare([1.0] * 4, [2.0] * 4) is None


@pytest.mark.parametrize(("freedom", "quantile"), [(4, 2.776), (9, 2.262), (30, 2.042)])
def test_student(freedom: int, quantile: float) -> None:
    assert _student(freedom) == pytest.approx(quantile, rel=0.003)


@given(st.lists(st.tuples(Times, Times), min_size=5, max_size=9))
def test_the_other_way_round_is_the_inverse(pairs: list[tuple[float, float]]) -> None:
    a, b = [x for x, _ in pairs], [y for _, y in pairs]
    there, back = compare(a, b), compare(b, a)
    assert there and back and there.low <= there.ratio * (1 + 1e-9) and there.ratio <= there.high * (1 + 1e-9)
    assert there.ratio == pytest.approx(1 / back.ratio)
    if len(pairs) <= 7:  # listed, not sampled
        assert there.low == pytest.approx(1 / back.high) and there.high == pytest.approx(1 / back.low)
