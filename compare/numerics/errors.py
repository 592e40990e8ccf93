"""Numerics: what counts as right.

error = max|y - reference| / rms(reference), the reference in float64 (absolute where the reference is zero throughout).
tolerance = twice the error of an independent evaluation in the case's own dtype (the reference's formula, operation by
operation, on the input set where it errs most; of values near the dtype's largest in float32, rounded at the end; see
compare.numerics.reference), and never under one unit in the last place of the largest reference value, which storing
alone may cost. An implementation that passes is as good as plain low-precision code; nothing is tuned.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

LargestDifference = Callable[[Any, Any], float]


@dataclass(frozen=True)
class Verdict:
    """The error of one output or gradient beside what it may be."""

    name: str
    error: float
    tolerance: float

    @property
    def right(self) -> bool:
        return self.error <= self.tolerance and math.isfinite(self.error)  # plain code may overflow

    @property
    def severity(self) -> tuple[bool, float]:
        """Orders verdicts, the worst last: by the error over its own tolerance, and what is not right behind all that
        is. Tolerances of two input sets differ: the larger of two errors may be right and the smaller one not."""
        if not math.isfinite(self.error):
            return True, math.inf
        return not self.right, self.error / self.tolerance if self.tolerance else self.error

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def relative_error(values: Any, reference: Any, rms: float, largest_difference: LargestDifference) -> float:
    """max|values - reference| / rms; infinite if a value is not finite.

    `largest_difference` computes max|a - b| in float64 in the arrays' own framework.
    Raises ValueError on a wrong shape: an array that broadcasts is not a right answer.
    """
    if tuple(values.shape) != tuple(reference.shape):
        raise ValueError(f"shape {tuple(values.shape)}, expected {tuple(reference.shape)}")
    if math.prod(reference.shape) == 0:
        return 0.0
    error = largest_difference(values, reference)
    if not math.isfinite(error):
        return math.inf
    return error / rms if rms else error


def describe(verdicts: list[Verdict]) -> str | None:
    """What is wrong, in words, or None."""
    wrong = [v for v in verdicts if not v.right]
    if not wrong:
        return None
    return "; ".join(f"{v.name}: error {v.error:.3g} exceeds tolerance {v.tolerance:.3g}" for v in wrong)
