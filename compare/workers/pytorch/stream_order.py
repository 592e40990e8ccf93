"""The check that a call's results are written before the caller's stream continues.

A call may use a stream of its own if the caller's stream waits for it. Without that wait the results are right once the
whole device is idle, as after every timed call, but the next operation of a real caller reads old memory.

The check fills every multiprocessor with a kernel of another stream, so that the call's kernels cannot begin. Then a
copy engine, which needs no multiprocessor, reads the results in the caller's stream. After a correct call the copy
waits and reads the results; otherwise it reads the memory as it was.

A correct call cannot fail this check. A late one can pass if its host side takes longer than BUSY_SECONDS, or if it
makes the host wait for the device. An allocation can do so; the program's earlier calls have made theirs.
"""

from __future__ import annotations

import ctypes
import functools
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from xlafuse.triton_side.calls import cuda_program

BUSY_SECONDS = 0.02
_WINDOWS, _ELEMENTS = 16, 1024  # windows of each result, and elements of each window


def late(call: Callable[[], dict[str, torch.Tensor]]) -> list[str]:
    """Return the names of results of `call` that its caller's stream could read before they were written.

    The caller makes sure that the device is idle, and that the memory of the results holds other bits.
    """
    unused = _host_memory()
    occupy()
    copies = []
    for name, result in call().items():
        for window in _windows(result.detach()):
            size = window.numel() * window.element_size()
            found, unused = unused[:size].view(window.dtype), unused[-(-size // 16) * 16 :]  # every view is aligned
            found.copy_(window, non_blocking=True)
            copies.append((name, window, found))
    torch.cuda.synchronize()
    return list(dict.fromkeys(name for name, window, found in copies if not _same_bits(window.cpu(), found)))


def occupy() -> None:
    """Occupy all multiprocessors of the idle device for BUSY_SECONDS, and return once they are full."""
    device = torch.device("cuda", torch.cuda.current_device())
    properties = torch.cuda.get_device_properties(device)
    source = str(Path(__file__).with_name("occupy.cu"))
    kernel = cuda_program.compile_kernel(source, "occupy", cuda_program.device_arch(device))
    blocks = properties.multi_processor_count * (properties.max_threads_per_multi_processor // 1024)
    with torch.cuda.stream(_stream()):
        cuda_program.launch(kernel, blocks, (1024, 1), (ctypes.c_longlong(int(BUSY_SECONDS * 1e9)),), device)
    time.sleep(0.0005)  # until the launch has reached the device


def _windows(result: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield evenly spaced windows of the result's memory, from its first element to the end."""
    first, past = result.storage_offset(), result.untyped_storage().nbytes() // result.element_size()
    count = min(_ELEMENTS, past - first)
    for index in range(_WINDOWS):
        yield result.as_strided((count,), (1,), first + index * (past - first - count) // (_WINDOWS - 1))


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@functools.cache
def _stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()


@functools.cache
def _host_memory() -> torch.Tensor:
    """Return pinned memory for 64 results, allocated before the device is busy, because allocating can wait for it."""
    return torch.empty(64 * _WINDOWS * _ELEMENTS * 4, dtype=torch.uint8, pin_memory=True)
