"""The agreement of the losses of two runs of a training program, within rounding.

The first loss precedes every update, so only the forward pass rounds differently. A loss is a mean, in which most
roundings of single values cancel. It may differ by one rounding of itself to the coarsest dtype that computes, half of
that dtype's epsilon, and by 16 epsilons of its own dtype, in which it is summed. Later losses follow updates, and
training amplifies each difference: no dtype bounds them. They have to agree in half of the digits: within the square
root of the first loss's tolerance.

Errors are relative to the largest value in all compared steps, so a loss may come close to zero. Several values in a
step have a scale each: the least is compared with the least.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..spec.dtype import EPS

_ROUNDINGS = 16  # of the loss's own dtype
TF32 = "tf32"
_EPS = {**EPS, TF32: 2.0**-10}


@dataclass(frozen=True)
class StepLosses:
    """The losses of a step before and after, from the least.

    error: the largest relative difference; infinite where a loss is no finite number. worst: the values that it is of.
    """

    step: int
    before: tuple[float, ...]
    after: tuple[float, ...]
    error: float
    worst: tuple[float, float]
    allowed: float


@dataclass(frozen=True)
class LossAgreement:
    """The compared steps; none where no loss was seen in both runs. dtype: the coarsest of those that compute."""

    steps: tuple[StepLosses, ...]
    dtype: str

    @property
    def agree(self) -> bool | None:
        """Return None where nothing was compared."""
        return all(step.error <= step.allowed for step in self.steps) if self.steps else None

    def to_json(self) -> dict[str, Any]:
        steps = [
            {
                "step": each.step, "before": _finite(*each.before), "after": _finite(*each.after),
                "error": _finite(each.error)[0], "allowed": each.allowed,
            }
            for each in self.steps
        ]
        return {"agree": self.agree, "dtype": self.dtype, "steps": steps}


def agreement(
    before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]], dtypes: Sequence[str]
) -> LossAgreement:
    """Compare losses as `step_record` wrote them. dtypes: those that the program computes in, by their long names.

    A step is compared if both runs saw as many values in it.
    """
    others = {each["step"]: each["values"] for each in after}
    pairs = [
        (each["step"], *(tuple(sorted(values)) for values in (each["values"], others[each["step"]])))
        for each in before if len(others.get(each["step"], ())) == len(each["values"])
    ]
    own = max((_EPS.get(each["dtype"], 0.0) for each in before), default=0.0)
    coarsest = max([*dtypes, *(each["dtype"] for each in before)], key=lambda name: _EPS.get(name, 0.0), default="")
    allowed = _EPS.get(coarsest, 0.0) / 2 + _ROUNDINGS * own
    scales: dict[int, float] = {}  # by the place among a step's values
    for _, *both in pairs:
        for place, value in (each for run in both for each in enumerate(run) if math.isfinite(each[1])):
            scales[place] = max(scales.get(place, 0.0), abs(value))
    steps = []
    for step, old, new in pairs:
        errors = [_error(*values, scales.get(place, 0.0)) for place, values in enumerate(zip(old, new, strict=True))]
        worst = errors.index(max(errors))
        limit = allowed if step == 0 else math.sqrt(allowed)
        steps.append(StepLosses(step, old, new, errors[worst], (old[worst], new[worst]), limit))
    return LossAgreement(tuple(steps), coarsest)


def _error(before: float, after: float, scale: float) -> float:
    return abs(after - before) / (scale or 1.0) if math.isfinite(before) and math.isfinite(after) else math.inf


def _finite(*values: float) -> list[float | None]:
    return [value if math.isfinite(value) else None for value in values]
