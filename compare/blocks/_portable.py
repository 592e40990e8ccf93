"""What references need of arrays and NumPy and PyTorch spell differently."""

from typing import Any


def at_least_float32(xp: Any, x: Any) -> Any:
    """x, in float32 where its dtype is narrower.

    For sums that every sound implementation keeps in float32 whatever it stores: an independent evaluation that added
    up in bfloat16 would tolerate anything.
    """
    if x.dtype.itemsize >= 4:
        return x
    return x.astype(xp.float32) if hasattr(x, "astype") else x.to(xp.float32)
