"""Tolerances, derived from an independent evaluation in the case's own dtype."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Scale:
    """What the tolerance of one tensor needs to know of its reference."""

    rms: float
    largest: float
    independent_error: float

    def tolerance(self, eps: float) -> float:
        one_ulp = eps * self.largest / self.rms if self.rms else eps
        return max(2 * self.independent_error, one_ulp)


def alike(sets: Sequence[Mapping[str, Mapping[str, float]]]) -> list[dict[str, dict[str, float]]]:
    """The scales of each input set with the largest independent error of all: sets differ by the seed alone, and the
    error of an output of few elements is luck. Of one loss it was 2e-5 with one seed and 4e-7 with the other."""
    largest = {name: max(each[name]["independent_error"] for each in sets) for name in sets[0]}
    return [{name: {**scale, "independent_error": largest[name]} for name, scale in each.items()} for each in sets]
