"""Whoever times kernels to choose one has the GPU for itself: a lock that the processes of a run share.

Choosing is mostly compiling candidates, for which processes need not wait for each other. Inductor times its candidates
between; when XLA does so cannot be told from outside, and so it holds the lock while it compiles.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from compare.spec import Block, Implementation

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


def turn() -> AbstractContextManager[None]:
    """In a worker: `alone` under its run's lock; nothing to wait for where no run names one."""
    lock = os.environ.get(VARIABLE)
    return alone(Path(lock)) if lock else nullcontext()


def by_xla(block: Block, implementation: Implementation) -> bool:
    """Whether XLA times kernels to choose one: it does for products and what is built of them, unless it is given the
    kernels."""
    return block.work == "flops" and implementation.framework == "xla" and implementation.compiler != "xla-triton"
