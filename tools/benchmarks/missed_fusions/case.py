"""One forced missed fusion: two functions of equal results, one of which a compiler does not fuse."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Size = Literal["large", "fits L2", "tiny"]
Array = tuple[tuple[int, ...], str]  # shape and dtype

_CHECKED = 64  # elements along an axis, at most, when results are compared on the CPU


@dataclass(frozen=True)
class Case:
    """A pair of functions of the same arrays.

    size: of the intermediate. "large" exceeds the L2 cache, and "tiny" takes less time than a launch.
    unfused_options, fused_options: the compiler's options for each function.
    products: the kernels of matrix products on an absent GPU, as `triton_side.deviceless.user_functions` takes them.
    """

    name: str
    size: Size
    arrays: tuple[Array, ...]
    unfused: Callable[..., Any]
    fused: Callable[..., Any]
    unfused_options: Mapping[str, Any] = field(default_factory=dict)
    fused_options: Mapping[str, Any] = field(default_factory=dict)
    products: Literal["triton"] | None = None

    @property
    def programs(self) -> dict[str, tuple[Callable[..., Any], Mapping[str, Any]]]:
        """The two functions with their options, by name."""
        return {"unfused": (self.unfused, self.unfused_options), "fused": (self.fused, self.fused_options)}

    @property
    def small_arrays(self) -> tuple[Array, ...]:
        """The arrays with every axis shortened, to compare results on the CPU."""
        return tuple((tuple(min(length, _CHECKED) for length in shape), dtype) for shape, dtype in self.arrays)


def difference(errors: Iterable[float], eps: float) -> dict[str, float]:
    """Return the largest error of the results' arrays, NaN where one is, and the largest allowed one.

    errors: of each array, the largest |a - b| / (|b| + rms(b)). eps: of their dtype. The two programs round their
    intermediates differently: an exponential of 5 in bfloat16 differs by 0.02. Sums in float32 differ in their order.
    """
    worst = max(errors, key=lambda error: math.inf if math.isnan(error) else error)
    return {"error": worst, "tolerance": max(8 * eps, 1e-5)}
