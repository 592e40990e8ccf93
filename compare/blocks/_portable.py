"""What references need of arrays and NumPy and PyTorch spell differently."""

from typing import Any


def at_least_float32(xp: Any, x: Any) -> Any:
    """x, in float32 where its dtype is narrower.

    For sums that every sound implementation keeps in float32 whatever it stores: an independent evaluation that added
    up in bfloat16 would tolerate anything.
    """
    return x if x.dtype.itemsize >= 4 else cast(x, xp.float32)


def cast(x: Any, dtype: Any) -> Any:
    """x in that dtype; what is differentiated stays so."""
    return x.astype(dtype) if hasattr(x, "astype") else x.to(dtype)
