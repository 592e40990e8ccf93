"""Copies and waits on a CUDA stream by memory address: calls of the CUDA driver.

Each slice or view of a tensor costs the host microseconds, and the host is often the limit of a step over several GPUs.
A wait is no kernel: that would need a multiprocessor, and a persistent product occupies all of them until it ends.
"""

import ctypes
from collections.abc import Sequence
from functools import cache

AT_LEAST, EQUAL = 0, 1  # CU_STREAM_WAIT_VALUE_GEQ: the difference as a signed 32-bit integer is not negative; _EQ
WAIT, WRITE = 1, 2  # CU_STREAM_MEM_OP_WAIT_VALUE_32, CU_STREAM_MEM_OP_WRITE_VALUE_32


class _MemoryOperation(ctypes.Structure):
    """CUstreamBatchMemOpParams, a union of 48 bytes, for a wait or a write."""

    _fields_ = (
        ("operation", ctypes.c_uint), ("address", ctypes.c_uint64), ("value", ctypes.c_uint64),
        ("flags", ctypes.c_uint), ("alias", ctypes.c_uint64), ("unused", ctypes.c_uint64),
    )


@cache
def _driver() -> ctypes.CDLL:
    library = ctypes.CDLL("libcuda.so.1")
    library.cuMemcpyAsync.argtypes = (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p)
    library.cuStreamWaitValue32_v2.argtypes = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint)
    library.cuStreamBatchMemOp_v2.argtypes = (
        ctypes.c_void_p, ctypes.c_uint, ctypes.POINTER(_MemoryOperation), ctypes.c_uint
    )
    return library


def copy(stream: int | None, to: int, of: int, size: int) -> None:
    """Copy bytes between two addresses, of GPUs or of pinned memory. Without a stream, both are of the CPU.

    Raises:
        RuntimeError: the driver refuses.
    """
    if stream is None:
        ctypes.memmove(to, of, size)
    elif size and (error := _driver().cuMemcpyAsync(to, of, size, stream)):
        raise RuntimeError(f"cuMemcpyAsync of {size} bytes returned CUresult {error}")


def wait_until_at_least(stream: int, address: int, value: int) -> None:
    """Make later work of the stream wait until the 32-bit word at a GPU address is at least `value`.

    Raises:
        RuntimeError: the driver refuses.
    """
    if error := _driver().cuStreamWaitValue32_v2(stream, address, value, AT_LEAST):
        raise RuntimeError(
            f"cuStreamWaitValue32 returned CUresult {error}; it needs a driver of CUDA 12 or later and GPU memory"
        )


def wait_for_ones(stream: int, addresses: Sequence[int]) -> None:
    """Make later work of the stream wait until each 32-bit word at these GPU addresses is 1, and then set all to 0.

    A CUDA graph that captures it waits anew in each replay. NCCL waits so in its graphs (src/ce_coll.cc, 2.28).

    Raises:
        RuntimeError: the driver refuses.
    """
    waits = [_MemoryOperation(WAIT, address, 1, EQUAL) for address in addresses]
    writes = [_MemoryOperation(WRITE, address, 0) for address in addresses]
    operations = (_MemoryOperation * (2 * len(addresses)))(*waits, *writes)
    if error := _driver().cuStreamBatchMemOp_v2(stream, len(operations), operations, 0):
        raise RuntimeError(f"cuStreamBatchMemOp returned CUresult {error}; it needs a driver of CUDA 12 or later")
