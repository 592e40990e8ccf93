"""What a worker does for a profiler that watches its process: marks where the parts of a call begin and end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

BOUNDARY = "xlafuse_boundary"  # an empty kernel

_PTX = f"""
.version 7.0
.target sm_70
.address_size 64
.visible .entry {BOUNDARY}() {{ ret; }}
"""


@contextmanager
def profiling() -> Iterator[None]:
    """The profiler collects within (cudaProfilerStart and Stop, by the driver's names)."""
    driver = _driver()
    _check(driver.cuProfilerStart())
    try:
        yield
    finally:
        _check(driver.cuProfilerStop())


def bounded(call: Callable[[], Any], synchronize: Callable[..., None]) -> Any:
    """Run `call` between two boundary kernels, the device idle before and after."""
    synchronize()
    _launch_boundary()
    result = call()
    synchronize(result)
    _launch_boundary()
    return result


def _launch_boundary() -> None:
    driver = _driver()
    _check(driver.cuLaunchKernel(_boundary(), 1, 1, 1, 1, 1, 1, 0, 0, 0, 0))
    _check(driver.cuCtxSynchronize())


@cache
def _boundary() -> Any:
    driver = _driver()
    # The context that both frameworks use; JAX leaves none current in this thread.
    _check(driver.cuInit(0))
    (device,) = _check(driver.cuDeviceGet(0))
    (context,) = _check(driver.cuDevicePrimaryCtxRetain(device))
    _check(driver.cuCtxSetCurrent(context))
    (module,) = _check(driver.cuModuleLoadData(_PTX.encode() + b"\0"))
    (function,) = _check(driver.cuModuleGetFunction(module, BOUNDARY.encode()))
    return function


def _driver() -> Any:
    from cuda.bindings import driver

    return driver


def _check(returned: tuple[Any, ...]) -> tuple[Any, ...]:
    status, *values = returned
    if int(status):
        raise RuntimeError(f"the CUDA driver refused: {status.name}")
    return tuple(values)
