"""Whoever times kernels to choose one has the GPU for itself: a lock that the processes of a run share.

Choosing is mostly compiling candidates, for which lanes need not wait for each other. Inductor times its candidates
between; when XLA does so cannot be told from outside, and so it holds the lock for a whole compile.
"""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path

VARIABLE = "XLAFUSE_TUNING_LOCK"  # tells workers the lock's file


def lock_of(folder: Path) -> Path:
    """A run's."""
    return folder / "logs" / "tuning"


@contextlib.contextmanager
def alone(lock: Path) -> Iterator[None]:
    """Wait for the lock and hold it; the kernel takes it from a process that ends."""
    with lock.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
