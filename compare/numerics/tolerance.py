"""Tolerances: twice the error of an independent evaluation in the case's own dtype.

The independent evaluation is the reference's formula, operation by operation (compare.numerics.reference). The input
set on which it errs most counts for all. For values near the dtype's largest it runs in float32 and rounds at the end.
A tolerance is at least one unit in the last place of the largest reference value, which storing alone may cost. So an
implementation that passes is as good as plain low-precision code, and no tolerance is tuned.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Scale:
    """A reference's magnitude, and the error of the independent evaluation against it."""

    rms: float
    largest: float
    independent_error: float

    def tolerance(self, eps: float) -> float:
        """Return the tolerance of the relative error. eps: machine epsilon of the dtype that stores the result."""
        one_ulp = eps * self.largest / self.rms if self.rms else eps
        return max(2 * self.independent_error, one_ulp)


def share_worst_error(sets: Sequence[Mapping[str, Mapping[str, float]]]) -> list[dict[str, dict[str, float]]]:
    """Return the scales of each input set with the largest independent error over all sets.

    Sets differ by the seed only, and the error of an output with few elements is luck: a loss erred by 2e-5 with one
    seed and by 4e-7 with the other.
    """
    largest = {name: max(each[name]["independent_error"] for each in sets) for name in sets[0]}
    return [{name: {**scale, "independent_error": largest[name]} for name, scale in each.items()} for each in sets]
