"""Marks for a profiler that watches a worker: empty kernels where the phases of a call begin and end.

`python -m xlafuse.compare.measure.profiler_marks` marks an empty call, which shows whether a profiler can watch a
process here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from . import ptx_launch

BEGIN, END = "xlafuse_begin_", "xlafuse_end"  # names of empty kernels; a mark follows BEGIN
PROBE = "probe"  # the mark of the empty call


@contextmanager
def profiling() -> Iterator[None]:
    """Let the profiler collect."""
    ptx_launch.start_profiler()
    try:
        yield
    finally:
        ptx_launch.stop_profiler()


def bounded(call: Callable[[], Any], synchronize: Callable[..., None], mark: str) -> Any:
    """Profile `call` between two marks, with an idle device around it. mark: letters, digits, underscores."""
    synchronize()
    with profiling():
        ptx_launch.launch(f"{BEGIN}{mark}", "ret;")
        result = call()
        synchronize(result)
        ptx_launch.launch(END, "ret;")
    return result


def main() -> None:
    ptx_launch.launch(END, "ret;")  # makes the context, which a profiler needs before it collects
    bounded(lambda: None, lambda result=None: None, PROBE)


if __name__ == "__main__":
    main()
