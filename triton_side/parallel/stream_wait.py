"""Let a CUDA stream wait for a word of memory, without a kernel: cuStreamWaitValue32 of the CUDA driver API.

A kernel that waits needs a multiprocessor, and a persistent product occupies all of them until it ends.
"""

import ctypes
from functools import cache

AT_LEAST = 0  # CU_STREAM_WAIT_VALUE_GEQ: the difference as a signed 32-bit integer is not negative


@cache
def _driver() -> ctypes.CDLL:
    library = ctypes.CDLL("libcuda.so.1")
    library.cuStreamWaitValue32_v2.argtypes = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint)
    return library


def wait_until_at_least(stream: int, address: int, value: int) -> None:
    """Make later work of the stream wait until the 32-bit word at a GPU address is at least `value`.

    Raises:
        RuntimeError: the driver refuses.
    """
    error = _driver().cuStreamWaitValue32_v2(stream, address, value, AT_LEAST)
    if error:
        raise RuntimeError(
            f"cuStreamWaitValue32 returned CUresult {error}; it needs a driver of CUDA 12 or later and GPU memory"
        )
