"""Who times kernels to choose one is undisturbed by others who do: under a lock of the run's, XLA's processes compile
in turns, and Inductor's time in turns.

To tune is what takes long of that: `inductor-max`, and XLA where it does not find its choices made already. Whoever is
timed for the record holds the lock, too. What Inductor times by default, a few configurations of a kernel and paddings
of a product, it times beside others' first calls: of 40 of its programs on an H200, 36 took what they took in an
earlier run, within 5%, two less, as their random numbers had become cheaper, and two 1.10 times as long.

What comes before and after XLA's compile (tracing, graphs, dumps) takes as long again, side by side. What it chooses so
is as good as alone: 17 programs of moe and gpt2_block took 1.003 times as long as those tuned alone, in the median, and
1.02 at most. What `inductor-max` chooses differs from run to run, alone or not: layernorm's forward kernel in training
(4096 columns, bf16, torch 2.11) took 32, 50 and 127 us as three runs chose it alone, and 128 and 169 us as two did
beside others.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

VARIABLE = "XLAFUSE_TUNING_LOCK"  # tells workers the lock's file
LONGEST_SECONDS = 300  # of a turn; the longest compile of XLA's in reports/h200-blocks took 19 s


def lock_of(folder: Path) -> Path:
    """A run's."""
    return folder / "logs" / "tuning"


@contextlib.contextmanager
def alone(lock: Path) -> Iterator[None]:
    """Wait for the lock and hold it; the kernel takes it from a process that ends."""
    with lock.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def turn() -> Iterator[None]:
    """In a worker: `alone` under its run's lock; nothing to wait for where no run names one. What hangs in its turn
    ends with its process (SIGALRM), before the requests of those who wait for theirs are given up."""
    lock = os.environ.get(VARIABLE)
    if not lock:
        yield
        return
    with alone(Path(lock)):
        signal.alarm(LONGEST_SECONDS)
        try:
            yield
        finally:
            signal.alarm(0)


class Turns:
    """Turns, and the seconds that were waited for them."""

    def __init__(self) -> None:
        self.waited = 0.0

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        asked = time.perf_counter()
        with turn():
            self.waited += time.perf_counter() - asked
            yield
