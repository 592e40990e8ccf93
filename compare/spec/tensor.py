"""A tensor of a block: a named array with named axes, and the distribution of its values."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .case import MAGNITUDE, Case, Sizes
from .dtype import DTYPES, OTHER_BYTES

Arrays = Mapping[str, Any]


@dataclass(frozen=True)
class Tensor:
    """A named array with named axes. Values are drawn from a normal distribution of this `mean` and `std`.

    fan_in: the axis whose size n scales `std` by 1/sqrt(n), so that products with weights keep unit variance.
    dtype: its own dtype in every case: "int32", "float32", "float8_e4m3fn". Integers (labels, positions) and fp8 have
        no gradient.
    draw: `draw(generator, sizes)` samples other distributions with a numpy.random.Generator; None draws from the normal
        distribution, and so does a result of None.
    read: the number of elements that a phase must read, where it is fewer than all: the rows looked up in a table.
    split: the axis that is divided among the ranks of a case that spans several GPUs; None: each rank has all of it.
    magnified: in shapes with a `magnitude`, `std` is multiplied by it, for values near the dtype's largest.
    optional: those of its axes that the array lacks in shapes without their size.
    """

    name: str
    axes: tuple[str, ...]
    mean: float = 0.0
    std: float = 1.0
    fan_in: str | None = None
    dtype: str | None = None
    draw: Callable[[Any, Sizes], Any] | None = None
    read: Callable[[Sizes], int] | None = None
    magnified: bool = False
    split: str | None = None
    optional: tuple[str, ...] = ()

    def axes_in(self, sizes: Sizes) -> tuple[str, ...]:
        return tuple(axis for axis in self.axes if axis not in self.optional or axis in sizes)

    def shape(self, sizes: Sizes) -> tuple[int, ...]:
        return tuple(sizes[axis] for axis in self.axes_in(sizes))

    def rank_shape(self, sizes: Sizes, ranks: int) -> tuple[int, ...]:
        """Return the shape of a rank's slice."""
        return tuple(sizes[axis] // (ranks if axis == self.split else 1) for axis in self.axes_in(sizes))

    def of_rank(self, array: Any, rank: int, ranks: int) -> Any:
        """Return a rank's slice of the whole array: the array itself where no axis is split."""
        if self.split is None:
            return array
        axis = self.axes.index(self.split)
        size = array.shape[axis] // ranks
        return array[(slice(None),) * axis + (slice(rank * size, (rank + 1) * size),)]

    def elements(self, sizes: Sizes) -> int:
        return math.prod(self.shape(sizes))

    def dtype_in(self, case: Case) -> str:
        return self.dtype or case.dtype

    def itemsize(self, case: Case) -> int:
        dtype = self.dtype_in(case)
        return OTHER_BYTES.get(dtype) or DTYPES[dtype].itemsize

    def bytes(self, case: Case) -> int:
        return self.elements(case.sizes) * self.itemsize(case)

    def bytes_read(self, case: Case) -> int:
        """Return the fewest bytes that a phase which needs this tensor reads."""
        return self.read(case.sizes) * self.itemsize(case) if self.read else self.bytes(case)

    @property
    def differentiable(self) -> bool:
        return self.dtype not in OTHER_BYTES

    def scale(self, sizes: Sizes) -> float:
        std = self.std * sizes.get(MAGNITUDE, 1) if self.magnified else self.std
        return std / math.sqrt(sizes[self.fan_in]) if self.fan_in else std
