"""Remedies: the change to a part of a step, the gain that measured rows promise, and the evidence."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .advice import ADVICE, Advice
from .evidence import nearest
from .used_blocks import UsedBlock

_LEAST_GAIN = 0.01  # of the step: less is no remedy
_ORDER = {"switch": 0, "library": 1, "kernel": 2}


@dataclass(frozen=True)
class Remedy:
    """A change to a part.

    before_us: the part's device time in a step. after_us: what the measured row promises, scaled by work. evidence: the
    measured case and the time of the row there.
    """

    used: UsedBlock
    advice: Advice
    after_us: float
    evidence: str

    @property
    def before_us(self) -> float:
        return self.used.time_us

    @property
    def limits(self) -> str:
        """Where the change does not apply, and what the program does not show."""
        mask = "if its mask, which is data here, is causal" if self.used.has_unknown_mask else ""
        dropout = "the measured row has no dropout" if self.used.attributes.get("dropout") else ""
        return "; ".join(filter(None, [self.advice.limits, mask, dropout]))

    @property
    def gain_us(self) -> float:
        """The gain, which is never more than the part takes."""
        return max(0.0, self.before_us - self.after_us)


def remedies(blocks: Iterable[UsedBlock], compiler: str, target: str, step_us: float) -> list[list[Remedy]]:
    """Return the remedies of each block, the block with the largest gain first. Those of a block exclude each other.

    Within a block a switch comes before a library's call, and that before a kernel. A later one is listed only where it
    gains more. Nothing is listed without a measured row, or below a hundredth of the step.
    """
    found = []
    for used in blocks:
        own: list[Remedy] = []
        for advice in sorted((a for a in ADVICE if (a.block, a.compiler) == (used.block, compiler)), key=_rank):
            remedy = _remedy(used, advice, target)
            least = max([_LEAST_GAIN * step_us, *(1.02 * other.gain_us for other in own)])
            if remedy is not None and remedy.gain_us >= least:
                own.append(remedy)
        if own:
            found.append(own)
    return sorted(found, key=lambda own: -own[0].gain_us)


def _rank(advice: Advice) -> int:
    return _ORDER[advice.kind]


def _remedy(used: UsedBlock, advice: Advice, target: str) -> Remedy | None:
    """Return the remedy of a change; None where no row is measured near.

    A layer takes the row's time in training, or in inference where the step has no backward, and once more the time in
    inference where the step computes it again. A mask that is data counts as causal, which `limits` says.
    """
    sizes = {**used.sizes, "causal": 1, "window": 0} if used.has_unknown_mask else used.sizes
    directions = ["train" if "backward" in used.phases else "fwd", *(["fwd"] if "recompute" in used.phases else [])]
    total, names = 0.0, []
    for direction in directions:
        evidence = nearest(target, used.block, sizes, used.dtype, direction)
        time = None if evidence is None else evidence.scaled_us(advice.row)
        if evidence is None or time is None:
            return None
        total += time
        names.append(f"{evidence.name} {advice.row} {evidence.times_us[advice.row]:.0f} µs")
    return Remedy(used, advice, used.layers * total, "; ".join(names))

