"""Whether a call's results are written before what its caller's stream does next.

A call may work on a stream of its own if it makes the caller's stream wait for that. One that does not is right once
the whole device is idle, as after every timed call, yet the next operation of a real caller reads what was there
before. To see it, every multiprocessor is kept full by a kernel of another stream, so that nothing the call launches
can begin, and a copy engine, which needs no multiprocessor, reads the results in the caller's stream: of a sound call
it waits and reads what stays; of the other it reads the memory as it was.

A sound call cannot fail. A late one can slip through where its host side alone takes longer than BUSY_SECONDS, or where
it makes the host wait for the device, as an allocation can: its earlier calls have made those.
"""

from __future__ import annotations

import ctypes
import functools
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from triton_side.calls import cuda_program

BUSY_SECONDS = 0.02
_WINDOWS, _ELEMENTS = 16, 1024  # how many places of each result are read, and how much at each


def late(call: Callable[[], dict[str, torch.Tensor]]) -> list[str]:
    """Names of the results of `call` that were still to be written when its caller's stream came to read them.

    The device is idle, and the memory that the call will write to holds other bits than the results will have.
    """
    room = _host_memory()
    occupy()
    seen = []
    for name, result in call().items():
        for window in _windows(result.detach()):
            size = window.numel() * window.element_size()
            found, room = room[:size].view(window.dtype), room[-(-size // 16) * 16 :]  # every view aligned
            found.copy_(window, non_blocking=True)
            seen.append((name, window, found))
    torch.cuda.synchronize()
    return list(dict.fromkeys(name for name, window, found in seen if not _same_bits(window.cpu(), found)))


def occupy() -> None:
    """Fill the idle device for BUSY_SECONDS; returns once it is full."""
    device = torch.device("cuda", torch.cuda.current_device())
    properties = torch.cuda.get_device_properties(device)
    source = str(Path(__file__).with_name("occupy.cu"))
    kernel = cuda_program.compile_kernel(source, "occupy", cuda_program.device_arch(device))
    blocks = properties.multi_processor_count * (properties.max_threads_per_multi_processor // 1024)
    with torch.cuda.stream(_stream()):
        cuda_program.launch(kernel, blocks, (1024, 1), (ctypes.c_longlong(int(BUSY_SECONDS * 1e9)),), device)
    time.sleep(0.0005)  # a launch takes some microseconds to arrive


def _windows(result: torch.Tensor) -> Iterator[torch.Tensor]:
    """Evenly spaced runs of the result's memory, from its first element to the end."""
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
    """Pinned bytes, for 64 results; made before the device is busy, because making them can wait for it."""
    return torch.empty(64 * _WINDOWS * _ELEMENTS * 4, dtype=torch.uint8, pin_memory=True)
