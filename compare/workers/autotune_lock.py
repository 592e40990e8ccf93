"""The autotune lock: two processes of a run never time candidate kernels at the same time.

Two compilers autotune for long: `inductor-max`, and XLA where no recorded choice serves. A run starts them after the
parallel compiles of a batch (compare.run.on_gpu), and each waits for this lock while another one times. XLA's whole
compile holds the lock; Inductor holds it for each timing. The work before and after XLA's compile (tracing, graphs,
dumps) takes as long again and needs no lock.

Measured on an H200: 17 programs of moe and gpt2_block that XLA autotuned under the lock took 1.003 times the time of
those autotuned by one process (median; 1.02 at most). The choices of `inductor-max` differ from run to run with or
without other processes: layernorm's forward kernel in training (4096 columns, bf16, torch 2.11) took 32, 50 and 127 us
after three runs of one process each, and 128 and 169 us after two runs of several.

Inductor's default mode times a few configurations of a kernel, too, without the lock. On an H200,
36 of 40 of its programs took the same time as in an earlier run, within 5%. Two took less, and two 1.10 times as long.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

VARIABLE = "XLAFUSE_AUTOTUNE_LOCK"  # names the lock's file to the workers of a run
LONGEST_SECONDS = 300  # for one holder; XLA's longest compile in reports/h200-blocks took 19 s


def lock_of(folder: Path) -> Path:
    """Return the lock's file of a run folder."""
    return folder / "logs" / "autotune.lock"


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Wait for the lock of this worker's run, and hold it; without a run there is nothing to wait for.

    A holder that hangs ends with its process after LONGEST_SECONDS (SIGALRM), before the requests of waiting workers
    time out. The kernel takes the lock from a process that ends.
    """
    lock = os.environ.get(VARIABLE)
    if not lock:
        yield
        return
    with Path(lock).open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        signal.alarm(LONGEST_SECONDS)
        try:
            yield
        finally:
            signal.alarm(0)


class WaitingTime:
    """The lock, with the seconds that a compile waited for it; they are no part of its compile time."""

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        asked = time.perf_counter()
        with held():
            self.seconds += time.perf_counter() - asked
            yield
