"""Array operations of references that NumPy and PyTorch spell differently."""

from typing import Any


def at_least_float32(xp: Any, x: Any) -> Any:
    """Return x in float32 where its dtype is narrower.

    Every sound implementation sums in float32, whatever it stores. A tolerance from sums in bfloat16 would accept any
    result.
    """
    return x if x.dtype.itemsize >= 4 else _cast(x, xp.float32)


def in_dtype_of(x: Any, values: Any) -> Any:
    """Return the values in x's dtype, to store sums of `at_least_float32`."""
    return _cast(values, x.dtype)


def _cast(x: Any, dtype: Any) -> Any:
    return x.astype(dtype) if hasattr(x, "astype") else x.to(dtype)
