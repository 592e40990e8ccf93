"""A pause of Python's cyclic garbage collector."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the collector for code that creates many objects and few reference cycles.

    The collector visits all objects each time their number has grown by a quarter. Its visits took 10 s of the 18 s
    for a module of 100,000 kernels, and 29% of the CPU time for a page of 854 records, where it freed 35 objects.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
