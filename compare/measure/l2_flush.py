"""The L2 flush before each cold timed call: a read of 256 MB leaves L2 full of other, clean data.

It first gives back the bytes of L2 that earlier calls reserved for persisting accesses, where cuda.bindings is
installed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..base import host
from . import ptx_launch

BYTES = 256 << 20  # four times an H200's L2


class L2Flush:
    """Reads one buffer of BYTES, made at the first flush, by the framework's own sum.

    make_buffer: returns a float32 array of so many elements on the device. read: reads all of it. device: the GPU's
    number, where the framework leaves no context current. A flush returns the bytes of L2 that were reserved for
    persisting accesses.
    """

    def __init__(self, make_buffer: Callable[[int], Any], read: Callable[[Any], object], device: int = 0) -> None:
        self._make_buffer, self._read, self._device = make_buffer, read, device
        self._buffer: Any = None
        self._driver = bool(host.installed("cuda-bindings"))

    def __call__(self) -> int:
        reserved = ptx_launch.give_back_persisting_l2(self._device) if self._driver else 0
        if self._buffer is None:
            self._buffer = self._make_buffer(BYTES // 4)
        self._read(self._buffer)
        return reserved
