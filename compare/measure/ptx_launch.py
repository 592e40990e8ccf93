"""Small PTX kernels, loaded and launched by the CUDA driver in any framework's process."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any

_HEADER = ".version 7.0\n.target sm_70\n.address_size 64\n"


def launch(name: str, body: str, arguments: Sequence[int] = (), *, blocks: int = 1, threads: int = 1) -> None:
    """Launch a kernel in the default stream and wait for the device.

    body: the PTX between the braces; its parameters are 64-bit integers p0, p1, ... Raises RuntimeError with the name
    of the driver's error.
    """
    driver = _driver()
    values = (tuple(arguments), (ctypes.c_uint64,) * len(arguments)) if arguments else 0
    function = _function(name, body, len(arguments))
    _check(driver.cuLaunchKernel(function, blocks, 1, 1, threads, 1, 1, 0, 0, values, 0))
    _check(driver.cuCtxSynchronize())


def allocate(size: int) -> int:
    """Return the address of `size` bytes of device memory, filled with a nonzero number and never freed."""
    driver = _driver()
    _enter_context()
    (address,) = _check(driver.cuMemAlloc(size))
    _check(driver.cuMemsetD32(address, 0x3F9D70A4, size // 4))
    return int(address)


def memory() -> tuple[int, int]:
    """Return the free and the total bytes of the device's memory."""
    _enter_context()
    free, total = _check(_driver().cuMemGetInfo())
    return int(free), int(total)


def give_back_persisting_l2(device: int = 0) -> int:
    """Return the bytes of L2 that this process reserved for persisting accesses, after giving them back; as a rule 0.

    device: the number of the GPU in a thread without a current context.

    Lines that an access-policy window made persisting stay in L2 while other data is read, so a flush would miss them.
    Without reserved bytes, such a window has no effect (CUDA C++ Programming Guide, "L2 Set-Aside Cache for Persisting
    Accesses").
    """
    driver = _driver()
    _enter_context(device)
    limit = driver.CUlimit.CU_LIMIT_PERSISTING_L2_CACHE_SIZE
    status, reserved = driver.cuCtxGetLimit(limit)
    if status == driver.CUresult.CUDA_ERROR_UNSUPPORTED_LIMIT:  # GPUs older than Ampere, and slices of one
        return 0
    _check((status,))
    if reserved:
        _check(driver.cuCtxResetPersistingL2Cache())
        _check(driver.cuCtxSetLimit(limit, 0))
    return int(reserved)


def start_profiler() -> None:
    """Tell a profiler that watches this process to collect (cudaProfilerStart by the driver's name)."""
    _check(_driver().cuProfilerStart())


def stop_profiler() -> None:
    _check(_driver().cuProfilerStop())


@cache
def _function(name: str, body: str, parameters: int) -> Any:
    driver = _driver()
    _enter_context()
    declared = ", ".join(f".param .u64 p{i}" for i in range(parameters))
    ptx = f"{_HEADER}.visible .entry {name}({declared}) {{\n{body}\n}}\n"
    (module,) = _check(driver.cuModuleLoadData(ptx.encode() + b"\0"))
    (function,) = _check(driver.cuModuleGetFunction(module, name.encode()))
    return function


def _enter_context(device: int = 0) -> None:
    """Make a GPU's primary context current, which both frameworks use, in a thread that has none.

    PyTorch's threads have that of their GPU, and would go on with another one. JAX leaves none current.
    """
    driver = _driver()
    _check(driver.cuInit(0))
    (current,) = _check(driver.cuCtxGetCurrent())
    if int(current):
        return
    (handle,) = _check(driver.cuDeviceGet(device))
    (context,) = _check(driver.cuDevicePrimaryCtxRetain(handle))
    _check(driver.cuCtxSetCurrent(context))


def _driver() -> Any:
    from cuda.bindings import driver

    return driver


def _check(returned: tuple[Any, ...]) -> tuple[Any, ...]:
    status, *values = returned
    if int(status):
        raise RuntimeError(f"the CUDA driver refused: {status.name}")
    return tuple(values)
