"""Tiny kernels of our own in whichever framework's process this is: PTX loaded and launched by the CUDA driver."""

from __future__ import annotations

from functools import cache
from typing import Any

_HEADER = ".version 7.0\n.target sm_70\n.address_size 64\n"


def launch(name: str, body: str) -> None:
    """Run one thread of a kernel without parameters in the default stream, and wait for the device.

    `body` is the PTX between its braces. Raises RuntimeError with the driver's name for what went wrong.
    """
    driver = _driver()
    _check(driver.cuLaunchKernel(_function(name, body), 1, 1, 1, 1, 1, 1, 0, 0, 0, 0))
    _check(driver.cuCtxSynchronize())


def start_profiler() -> None:
    """Tell a profiler that watches this process to collect (cudaProfilerStart by the driver's name)."""
    _check(_driver().cuProfilerStart())


def stop_profiler() -> None:
    _check(_driver().cuProfilerStop())


@cache
def _function(name: str, body: str) -> Any:
    driver = _driver()
    # The context that both frameworks use; JAX leaves none current in this thread.
    _check(driver.cuInit(0))
    (device,) = _check(driver.cuDeviceGet(0))
    (context,) = _check(driver.cuDevicePrimaryCtxRetain(device))
    _check(driver.cuCtxSetCurrent(context))
    ptx = f"{_HEADER}.visible .entry {name}() {{\n{body}\n}}\n"
    (module,) = _check(driver.cuModuleLoadData(ptx.encode() + b"\0"))
    (function,) = _check(driver.cuModuleGetFunction(module, name.encode()))
    return function


def _driver() -> Any:
    from cuda.bindings import driver

    return driver


def _check(returned: tuple[Any, ...]) -> tuple[Any, ...]:
    status, *values = returned
    if int(status):
        raise RuntimeError(f"the CUDA driver refused: {status.name}")
    return tuple(values)
