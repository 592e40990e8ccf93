"""Tolerances: twice the error of an independent evaluation in the case's own dtype.

The independent evaluation is the reference's formula, operation by operation (compare.numerics.reference). The input
set on which it errs most counts for all. For values near the dtype's largest it runs in float32 and rounds at the end.
A tolerance is at least one unit in the last place of the largest reference value, which storing alone may cost. So an
implementation that passes is as good as plain low-precision code, and no tolerance is tuned.

A gradient that a program's types sum in a narrow dtype has a tolerance of its own (compare.numerics.rounded_sums).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Scale:
    """A reference's magnitude, and the errors of independent evaluations against it.

    rounded_error: that of the evaluation whose sums are rounded after each addition; None where it was not evaluated.
    """

    rms: float
    largest: float
    independent_error: float
    rounded_error: float | None = None

    def tolerance(self, eps: float, rounded_sums: bool = False) -> float:
        """Return the tolerance of the relative error. eps: machine epsilon of the dtype that stores the result.

        rounded_sums: of a program that sums it in its own dtype.
        """
        one_ulp = eps * self.largest / self.rms if self.rms else eps
        error = self.independent_error
        if rounded_sums and self.rounded_error is not None:
            error = max(error, self.rounded_error)
        return max(2 * error, one_ulp)


def share_worst_error(sets: Sequence[Mapping[str, Mapping[str, Any]]]) -> list[dict[str, dict[str, Any]]]:
    """Return the scales of each input set with the largest independent and rounded errors over all sets.

    Sets differ by the seed only, and the error of an output with few elements is luck: a loss erred by 2e-5 with one
    seed and by 4e-7 with the other.
    """

    def largest(name: str) -> dict[str, float]:
        kinds = [kind for kind in ("independent_error", "rounded_error") if sets[0][name].get(kind) is not None]
        return {kind: max(each[name][kind] for each in sets) for kind in kinds}

    worst = {name: largest(name) for name in sets[0]}
    return [{name: {**scale, **worst[name]} for name, scale in each.items()} for each in sets]
