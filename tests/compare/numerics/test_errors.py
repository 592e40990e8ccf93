"""Errors and tolerances."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xlafuse.compare.numerics.errors import ErrorCheck, describe, relative_error
from xlafuse.compare.numerics.tolerance import Scale, share_worst_error


def largest_difference(a: np.ndarray, b: np.ndarray) -> float:
    return float(abs(a - b).max())


finite = st.floats(-1e3, 1e3)
SCALE = {"rms": 1.0, "largest": 4.0}


@given(st.lists(finite, min_size=1, max_size=20), st.floats(1e-3, 1e3))
def test_error_is_the_largest_difference_over_rms(values: list[float], rms: float) -> None:
    reference = np.array(values)
    moved = reference.copy()
    moved[-1] += 1.0
    expected = abs(moved - reference).max() / rms
    assert relative_error(moved, reference, rms, largest_difference) == pytest.approx(expected)
    assert relative_error(reference, reference, rms, largest_difference) == 0


def test_input_sets_share_the_largest_independent_error() -> None:
    sets = [
        {"loss": {"rms": 2.0, "largest": 2.0, "independent_error": 2e-5}, "d_x": SCALE | {"independent_error": 0.1}},
        {"loss": {"rms": 3.0, "largest": 3.0, "independent_error": 4e-7}, "d_x": SCALE | {"independent_error": 0.2}},
    ]
    found = share_worst_error(sets)
    assert [each["loss"] for each in found] == [sets[0]["loss"], sets[1]["loss"] | {"independent_error": 2e-5}]
    assert [each["d_x"]["independent_error"] for each in found] == [0.2, 0.2]
    assert sets[1]["loss"]["independent_error"] == 4e-7


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_fails(bad: float) -> None:
    reference = np.ones(4)
    values = np.array([1, 1, bad, 1])
    assert relative_error(values, reference, 1.0, largest_difference) == math.inf
    assert not ErrorCheck("y", math.nan, 1.0).passes
    assert not ErrorCheck("y", math.inf, 1.0).passes
    assert not ErrorCheck("y", math.inf, math.inf).passes  # as where plain code overflows


def test_a_shape_that_broadcasts_is_refused() -> None:
    with pytest.raises(ValueError, match="shape"):
        relative_error(np.ones((1, 3)), np.ones((2, 3)), 1.0, largest_difference)


def test_an_empty_array_has_no_error() -> None:
    assert relative_error(np.ones((0, 3)), np.ones((0, 3)), 0.0, largest_difference) == 0


def test_tolerance_is_twice_the_independent_error_and_at_least_one_ulp_of_the_largest() -> None:
    assert Scale(rms=2.0, largest=8.0, independent_error=0.1).tolerance(eps=1e-3) == pytest.approx(0.2)
    assert Scale(rms=2.0, largest=8.0, independent_error=0.0).tolerance(eps=1e-3) == pytest.approx(4e-3)
    assert Scale(rms=0.0, largest=0.0, independent_error=0.0).tolerance(eps=1e-3) == pytest.approx(1e-3)


def test_the_description_names_each_failed_tensor() -> None:
    checks = [ErrorCheck("y", 0.1, 0.2), ErrorCheck("d_x", 0.5, 0.2), ErrorCheck("d_w", math.inf, 0.2)]
    reason = describe(checks)
    assert reason and "d_x: error 0.5" in reason and "d_w: error inf" in reason and "y:" not in reason
    assert describe(checks[:1]) is None


def test_the_worst_check_is_furthest_beyond_its_own_tolerance() -> None:
    ordered = [
        ErrorCheck("y", error, tolerance) for error, tolerance in ((2.0, 8.0), (1.0, 2.0), (0.5, 0.25), (math.inf, 1.0))
    ]
    assert sorted(reversed(ordered), key=lambda check: check.severity) == ordered
    for overflown in (ErrorCheck("y", math.inf, math.inf), ErrorCheck("y", math.nan, 1.0)):
        assert overflown.severity > ordered[1].severity
