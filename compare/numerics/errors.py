"""Errors of results: error = max|y - reference| / rms(reference), with the reference in float64.

The error is absolute where the reference is zero throughout. compare.numerics.tolerance derives its limit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ..record.record_fields import ErrorCheck

LargestDifference = Callable[[Any, Any], float]


def relative_error(values: Any, reference: Any, rms: float, largest_difference: LargestDifference) -> float:
    """Return max|values - reference| / rms, infinite if a value is not finite.

    largest_difference: computes max|a - b| in float64 in the arrays' own framework.
    Raises ValueError on a wrong shape, because an array that merely broadcasts is wrong.
    """
    if tuple(values.shape) != tuple(reference.shape):
        raise ValueError(f"shape {tuple(values.shape)}, expected {tuple(reference.shape)}")
    if math.prod(reference.shape) == 0:
        return 0.0
    error = largest_difference(values, reference)
    if not math.isfinite(error):
        return math.inf
    return error / rms if rms else error


def worst_of_each(checks: Iterable[ErrorCheck]) -> list[ErrorCheck]:
    """Return the worst check of each output and gradient, in the order in which their names first come."""
    worst: dict[str, ErrorCheck] = {}
    for check in checks:
        if check.name not in worst or check.severity > worst[check.name].severity:
            worst[check.name] = check
    return list(worst.values())


def worst_row(differences: Sequence[float], tolerances: Sequence[float], rms: float) -> tuple[float, float]:
    """Return (error, tolerance) of the row whose error is largest against its own tolerance, both relative to rms.

    differences: the largest difference in each row; tolerances: the largest that it may have.
    """
    if not all(map(math.isfinite, differences)):
        return math.inf, tolerances[0] / rms
    difference, tolerance = max(zip(differences, tolerances, strict=True), key=lambda row: row[0] / row[1])
    return difference / rms, tolerance / rms


def describe(checks: list[ErrorCheck]) -> str | None:
    """Return a sentence about each failed check, or None."""
    failed = [c for c in checks if not c.passes]
    if not failed:
        return None
    return "; ".join(f"{c.name}: error {c.error:.3g} exceeds tolerance {c.tolerance:.3g}" for c in failed)
