"""The autotune lock: two processes of a run never time candidate kernels at the same time.

Two compilers spend long on autotuning: `inductor-max`, and XLA where no recorded choice applies. A run starts them
after the parallel compiles of a batch (compare.run.on_gpu). XLA holds the lock for its whole compile, Inductor for each
timing. XLA's worker traces, builds graphs and writes dumps without the lock, which takes as long as the compile.

Measured on an H200, several processes under the lock against a single process:

- XLA, 17 programs of moe and gpt2_block: the autotuned programs took 1.003 times as long (median; 1.02 at most).
- `inductor-max`: its choices differ from run to run in both cases. Layernorm's forward kernel in training (4096
  columns, bf16, torch 2.11) took 32, 50 and 127 us after three runs of one process each. It took 128 and 169 us after
  two runs of several processes.

Inductor's default mode also times a few configurations of a kernel, under the lock, but beside other processes'
compiles. On an H200, 36 of 40 of its
programs took the same time as in an earlier run, within 5%. Two took less, and two took 1.10 times as long.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

VARIABLE = "XLAFUSE_AUTOTUNE_LOCK"  # the path of the lock file, set for the workers of a run
# The longest that one process may hold the lock. XLA's longest compile in a run of all blocks took 19 s.
LONGEST_SECONDS = 300


def lock_of(folder: Path) -> Path:
    """Return the path of a run folder's lock file."""
    return folder / "logs" / "autotune.lock"


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Wait for the lock of this worker's run, and hold it. A worker outside of a run has no lock to wait for.

    SIGALRM kills a process that holds the lock for LONGEST_SECONDS, before the requests of waiting workers time out.
    The operating system releases the lock of a process that ends.
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
    """The lock, and the seconds that a compile waited for it. The wait does not count as compile time."""

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        start = time.perf_counter()
        with held():
            self.seconds += time.perf_counter() - start
            yield
