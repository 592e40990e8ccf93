"""What references need of arrays and NumPy and PyTorch spell differently."""

from typing import Any


def at_least_float32(xp: Any, x: Any) -> Any:
    """x, in float32 where its dtype is narrower.

    For sums that every sound implementation keeps in float32 whatever it stores: an independent evaluation that added
    up in bfloat16 would tolerate anything.
    """
    return x if x.dtype.itemsize >= 4 else _cast(x, xp.float32)


def in_dtype_of(x: Any, values: Any) -> Any:
    """The values, in x's dtype: what is stored of sums of `at_least_float32`."""
    return _cast(values, x.dtype)


def _cast(x: Any, dtype: Any) -> Any:
    return x.astype(dtype) if hasattr(x, "astype") else x.to(dtype)
