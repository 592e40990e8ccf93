"""A barrier between the processes of one host, through a file that all of them map into memory.

Each process counts its arrivals and spins until every other count has reached its own, so all leave within
microseconds. A barrier of the frameworks would launch kernels, which a clock would see.
"""

from __future__ import annotations

import mmap
import struct
import time
from dataclasses import dataclass
from pathlib import Path

_SIZE = 64  # bytes for each count, a cache line


class HostBarrier:
    """One rank's end of the barrier. path: a file that all ranks name; the first to come makes it."""

    def __init__(self, path: Path, rank: int, ranks: int, seconds: float = 60.0) -> None:
        with path.open("a+b") as file:
            file.truncate(_SIZE * ranks)
            self._memory = mmap.mmap(file.fileno(), _SIZE * ranks)
        self._rank, self._ranks, self._seconds, self._arrivals = rank, ranks, seconds, 0

    def wait(self) -> None:
        """Return when every rank has called `wait` as often. Raises TimeoutError naming the ranks that did not."""
        self._arrivals += 1
        struct.pack_into("q", self._memory, _SIZE * self._rank, self._arrivals)
        deadline = time.monotonic() + self._seconds
        while missing := [rank for rank in range(self._ranks) if self._count(rank) < self._arrivals]:
            if time.monotonic() > deadline:
                raise TimeoutError(f"rank {self._rank} waited {self._seconds:.0f} s for ranks {missing}")

    def _count(self, rank: int) -> int:
        (found,) = struct.unpack_from("q", self._memory, _SIZE * rank)
        return int(found)


@dataclass(frozen=True)
class Rank:
    """This process's place among the ranks."""

    number: int
    count: int
    barrier: HostBarrier
