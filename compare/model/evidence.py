"""Measured rows of the suite on a GPU: those of the case nearest to a block of a user's program."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

from .. import targets
from ..graph.analyse.roofline import Ceilings
from ..sources.target_ceilings import target_ceilings
from ..spec.blocks import BLOCKS
from ..spec.case import Case
from ..spec.dtype import DTYPES
from ..targets import recorded_times

_FARTHEST = 10.0  # doublings of all sizes together, beyond which a case says nothing
_SWITCHES = ("causal", "window")  # sizes that choose another computation: both zero, or neither
_HALF = ("bfloat16", "float16")  # as fast as each other
_PRODUCTS = "swiglu_mlp"  # the block that is hardly more than products


@dataclass(frozen=True)
class Measured:
    """A measured row: the name of its case, the implementation, its time, and the wanted work over that of the case.

    before_us: the row's time before a change that does not change the row; 0 for other changes.
    """

    case: str
    row: str
    time_us: float
    work_ratio: float
    before_us: float = 0.0

    @property
    def scaled_us(self) -> float:
        """The time of the wanted case: the measured one times the ratio of their work."""
        return self.time_us * self.work_ratio

    @property
    def short(self) -> str:
        return f"{self.case} {self.row} {self._times}"

    def __str__(self) -> str:
        return f"{self.case}, {self.row}: {self._times}, at {self.work_ratio:.2f} times its work"

    @property
    def _times(self) -> str:
        return f"{f'{self.before_us:.0f} → ' if self.before_us else ''}{self.time_us:.0f} µs"


@dataclass(frozen=True)
class Evidence:
    """Times of a measured case, and the case of the user's program that it is nearest to.

    times_us: device time of a call, forward and backward together in training, by implementation.
    """

    target: str
    measured: Case
    wanted: Case
    times_us: Mapping[str, float]

    @property
    def name(self) -> str:
        return _name(self.measured)

    def measured_row(self, implementation: str) -> Measured | None:
        """Return the row of an implementation; None where it was not measured."""
        time = self.times_us.get(implementation)
        return None if time is None else Measured(self.name, implementation, time, self.work_ratio)

    @property
    def work_ratio(self) -> float:
        """The shortest time of the wanted case over that of the measured one."""
        return self.roofline_us / work_us(self.measured, target_ceilings(self.target))

    @property
    def roofline_us(self) -> float:
        """The shortest time of the wanted case at the GPU's ceilings."""
        return work_us(self.wanted, target_ceilings(self.target))

    @property
    def fastest(self) -> str:
        """The implementation with the shortest time."""
        return min(self.times_us, key=self.times_us.__getitem__)


def nearest(
    target: str, block: str, sizes: Mapping[str, int], dtype: str, direction: str, precision: str = "ieee"
) -> Evidence | None:
    """Return the measured case of a block nearest to these sizes; None where none is near.

    target: a GPU of a target pack ("h200"). sizes: by axis; an axis that is missing is taken from the measured case.
    dtype: the long name. direction: "fwd", or "train", which a joint program of forward and backward is, too. The
    distance is the sum of the doublings between the sizes. precision: of products of float32 arrays, "ieee" or "tf32".
    """
    found: list[tuple[float, Case]] = []
    for case in _measured(target).get(block, {}).values():
        same = case.direction == direction or (case.direction, direction) == ("joint", "train")
        if same and _alike(case.dtype, dtype) and _same_switches(case.sizes, sizes):
            other = (case.dtype != dtype) + (case.direction != direction) + (case.precision != precision)
            found.append((_distance(case.sizes, sizes) + 0.1 * other, case))
    distance, measured = min(found, key=lambda entry: entry[0], default=(math.inf, None))
    if measured is None or distance > _FARTHEST:
        return None
    wanted = Case(block, "yours", {**measured.sizes, **sizes}, dtype, measured.direction, measured.precision)
    prefix = f"{measured.id}/"
    recorded = _recorded(target)
    times = {name.removeprefix(prefix): time for name, time in recorded.items() if name.startswith(prefix)}
    return Evidence(target, measured, wanted, times)


def tf32_pair(target: str, row: str, direction: str) -> Measured | None:
    """Return a row of products in TF32, with its time in IEEE float32; None where it was not measured in both."""
    for case in _measured(target)[_PRODUCTS].values():
        ieee = replace(case, precision="ieee")
        before, after = (_recorded(target).get(f"{each.id}/{row}") for each in (ieee, case))
        if (case.precision, case.direction) == ("tf32", direction) and before is not None and after is not None:
            return Measured(_name(case), row, after, 1.0, before)
    return None


def work_us(case: Case, ceilings: Ceilings) -> float:
    """Return the shortest time of a case: for each phase the longer one of its bytes and of its FLOPs."""
    block, dtype = BLOCKS[case.block], "bfloat16" if case.dtype in _HALF else case.dtype
    rate = ceilings.rate(DTYPES[dtype].short)
    traffic, flops = block.compulsory_traffic(case), block.phase_flops(case)
    total = 0.0
    for phase, (read, written) in traffic.items():
        moved = (read + written) / ceilings.bandwidth(read, written)
        total += max(moved, flops[phase] / rate if rate else 0.0)
    return total * 1e6


@cache
def _recorded(target: str) -> dict[str, float]:
    return {name: time.device_time_us for name, time in recorded_times.read(targets.FOLDER / target).items()}


@cache
def _measured(target: str) -> dict[str, dict[str, Case]]:
    """Return the realistic cases that have a time on a target, by block and id."""
    recorded = {name.rpartition("/")[0] for name in _recorded(target)}
    return {
        name: {case.id: case for case in block.cases("full") if case.id in recorded} for name, block in BLOCKS.items()
    }


def _name(case: Case) -> str:
    return f"{case.block}/{case.name} {case.direction}{' tf32' if case.precision == 'tf32' else ''}"


def _alike(one: str, other: str) -> bool:
    return one == other or (one in _HALF and other in _HALF)


def _same_switches(measured: Mapping[str, int], sizes: Mapping[str, int]) -> bool:
    return all(bool(measured[name]) == bool(sizes[name]) for name in _SWITCHES if name in sizes and name in measured)


def _distance(measured: Mapping[str, int], sizes: Mapping[str, int]) -> float:
    shared = [name for name in sizes if name in measured and sizes[name] > 0 and measured[name] > 0]
    return sum(abs(math.log2(sizes[name] / measured[name])) for name in shared)
