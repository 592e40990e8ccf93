"""What a worker does for a profiler that watches its process: marks where the parts of a call begin and end.

`python -m compare.measure.profiler_marks` marks a call of nothing, to see whether a profiler can watch a process here
at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from . import ptx_launch

BEGIN, END = "xlafuse_begin_", "xlafuse_end"  # names of empty kernels; the first one's goes on with a mark
PROBE = "probe"  # the mark of the call of nothing


@contextmanager
def profiling() -> Iterator[None]:
    """The profiler collects within."""
    ptx_launch.start_profiler()
    try:
        yield
    finally:
        ptx_launch.stop_profiler()


def bounded(call: Callable[[], Any], synchronize: Callable[..., None], mark: str) -> Any:
    """Run `call` profiled, between two marks, the device idle before and after. mark: letters, digits, underscores."""
    synchronize()
    with profiling():
        ptx_launch.launch(f"{BEGIN}{mark}", "ret;")
        result = call()
        synchronize(result)
        ptx_launch.launch(END, "ret;")
    return result


def main() -> None:
    ptx_launch.launch(END, "ret;")  # makes the context, which a profiler must know before it is told to collect
    bounded(lambda: None, lambda result=None: None, PROBE)


if __name__ == "__main__":
    main()
