"""A named array with named axes, and how its values are drawn."""

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
    """A named array with named axes.

    An input is drawn from a normal distribution of this `mean` and `std`; `fan_in` names the axis whose size n scales
    `std` by 1/sqrt(n), so that products of inputs and weights keep unit variance. `draw(generator, sizes)` makes, with
    a numpy.random.Generator, what is not so distributed, or None for sizes of which it is. `dtype` is its own whatever
    the case's is: "int32", "float32", "float8_e4m3fn". Integers, as labels and positions are, and fp8 have no gradient.
    `read` says how many elements a part that needs it must read, where that is fewer than all: of a table, the rows
    that are looked up. What is `magnified` has `magnitude` times this `std` in shapes whose sizes have one: values near
    the dtype's largest.
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

    def shape(self, sizes: Sizes) -> tuple[int, ...]:
        return tuple(sizes[axis] for axis in self.axes)

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
        """By a part that needs it, at least."""
        return self.read(case.sizes) * self.itemsize(case) if self.read else self.bytes(case)

    @property
    def differentiable(self) -> bool:
        return self.dtype not in OTHER_BYTES

    def scale(self, sizes: Sizes) -> float:
        std = self.std * sizes.get(MAGNITUDE, 1) if self.magnified else self.std
        return std / math.sqrt(sizes[self.fan_in]) if self.fan_in else std
