"""Verdicts: ties are ties, planted slowdowns are found, and few noisy rounds decide nothing."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compare.verdict import TIE, compare

Times = st.floats(1e-6, 1e-2)


def rounds(generator: random.Random, seconds: float, noise: float, restarts: int = 1) -> list[list[float]]:
    return [[seconds * generator.gauss(1, noise) for _ in range(5)] for _ in range(restarts)]


@pytest.mark.parametrize("restarts", [1, 2])
def test_identical_code_seldom_wins_and_three_percent_is_found(restarts: int) -> None:
    generator = random.Random(0)
    same, slowed = [], []
    for _ in range(400):
        base = rounds(generator, 1e-4, 0.003, restarts)
        same.append(compare(rounds(generator, 1e-4, 0.003, restarts), base).word)  # type: ignore[union-attr]
        slowed.append(compare(rounds(generator, 1.03e-4, 0.003, restarts), base).word)  # type: ignore[union-attr]
    assert sum(word in ("tie", "unresolved") for word in same) >= 0.98 * len(same)
    assert slowed.count("slower") >= 0.95 * len(slowed)


def test_noise_is_said_with_what_it_hides() -> None:
    generator = random.Random(1)
    verdict = compare(rounds(generator, 1e-4, 0.05), rounds(generator, 1e-4, 0.05))
    assert verdict and verdict.word == "unresolved" and verdict.resolution > 0.03
    assert "nothing under" in str(verdict)


def test_words() -> None:
    base = [[1.0, 1.01, 0.99, 1.0, 1.0]]
    half = [[x / 2 for x in base[0]]]
    assert str(compare(half, base)) == "2.00x faster, 2.00 to 2.00"
    assert str(compare(base, half)) == "2.00x slower, 2.00 to 2.00"
    assert str(compare(base, base)) == "tie: within 1%"


def test_two_rounds_are_no_evidence() -> None:
    assert compare([[1.0, 1.0]], [[2.0, 2.0]]) is None


@given(st.lists(st.tuples(Times, Times), min_size=3, max_size=5))
def test_the_other_way_round_is_the_inverse(pairs: list[tuple[float, float]]) -> None:
    a, b = [[x for x, _ in pairs]], [[y for _, y in pairs]]
    there, back = compare(a, b), compare(b, a)
    assert there and back and there.low <= there.ratio * (1 + 1e-12)
    assert there.ratio == pytest.approx(1 / back.ratio) and there.low == pytest.approx(1 / back.high)
    opposite = {"faster": "slower", "slower": "faster", "tie": "tie", "unresolved": "unresolved"}
    assert back.word == opposite[there.word] or abs(there.low - 1 - TIE) < 1e-9 or abs(back.low - 1 - TIE) < 1e-9


def test_a_restart_that_disagrees_widens_the_interval() -> None:
    base = [[1.0] * 5] * 2
    agreeing, disagreeing = [[1.05] * 5, [1.05] * 5], [[1.0] * 5, [1.10] * 5]
    same, different = compare(agreeing, base), compare(disagreeing, base)
    assert same and same.word == "slower" and different and different.word == "unresolved"
    assert (different.low, different.high) == (pytest.approx(1.0), pytest.approx(1.10))
