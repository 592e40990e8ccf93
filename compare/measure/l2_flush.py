"""The L2 flush before each cold timed call: a read of 256 MB leaves L2 full of other, clean data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

BYTES = 256 << 20  # four times an H200's L2


class L2Flush:
    """Reads one buffer of BYTES, made at the first flush, by the framework's own sum.

    make_buffer: returns a float32 array of so many elements on the device. read: reads all of it.
    """

    def __init__(self, make_buffer: Callable[[int], Any], read: Callable[[Any], object]) -> None:
        self._make_buffer, self._read = make_buffer, read
        self._buffer: Any = None

    def __call__(self) -> None:
        if self._buffer is None:
            self._buffer = self._make_buffer(BYTES // 4)
        self._read(self._buffer)
