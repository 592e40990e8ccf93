"""What a worker does for a profiler that watches its process: marks where the parts of a call begin and end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from compare import driver

BOUNDARY = "xlafuse_boundary"  # an empty kernel


@contextmanager
def profiling() -> Iterator[None]:
    """The profiler collects within."""
    driver.start_profiler()
    try:
        yield
    finally:
        driver.stop_profiler()


def bounded(call: Callable[[], Any], synchronize: Callable[..., None]) -> Any:
    """Run `call` between two boundary kernels, the device idle before and after."""
    synchronize()
    driver.launch(BOUNDARY, "ret;")
    result = call()
    synchronize(result)
    driver.launch(BOUNDARY, "ret;")
    return result
