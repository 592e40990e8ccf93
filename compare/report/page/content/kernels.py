"""The kernels of a case on one time axis."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from ....graph import formats
from ....graph.join.kernel_records import assign
from ....graph.model import Kernel
from ....sources.case_results import CaseResults
from ....sources.result import Result
from ... import roofline

_SPACE = 0.01  # between forward and backward, relative to the first


def where(kernel: Kernel) -> str:
    """Return the first stages of the program in a kernel, or else its first source line."""
    named = [formats.name(stage, 32) for stage in kernel.stages[:3]]
    more = ", …" if len(kernel.stages) > len(named) else ""
    return ", ".join(named) + more if named else "".join(map(formats.place, kernel.lines[:1]))


def bars(case: CaseResults) -> list[dict[str, Any]]:
    """Return the bars of each implementation.

    A timed case shows the launches of a median call. Otherwise each kernel's time in a profile, or its roofline time if
    there is no profile, comes after the last one's. Backward begins where forward ends. "index": the kernel's position
    in launch order; null for a helper launch (a memset, a copy, or one that a library adds), whose name is in "helpers"
    by the bar's position. "gap" and "took": the time since the end of the last bar, and the bar's length, ns.
    """
    bars_of_results = []
    for result in case.ranked:
        drawn = list(_measured(result) if case.timed else _one_after_the_other(result))
        if drawn:
            bars_of_results.append(_packed(result.name, drawn))
    return bars_of_results


def end_us(bars: Mapping[str, Any]) -> float:
    """Return the end of an implementation's last bar in µs."""
    return max(accumulate(map(operator.add, bars["gap"], bars["took"]))) / 1e3


class _Bar(NamedTuple):
    """kernel: its position in launch order; None for a helper launch. name: at run time. Times in µs."""

    kernel: int | None
    name: str
    start: float
    took: float


def _measured(result: Result) -> Iterator[_Bar]:
    joined: dict[int, int] = {}
    if result.graph is not None and result.graph.kernels:
        kernels, _ = assign(result.graph, result.launches)
        joined = {id(record): index for index, records in kernels.items() for record in records}
    at = 0.0
    for ran in result.launches.values():
        first, last = min((r.start for r in ran), default=0.0), max((r.end for r in ran), default=0.0)
        for record in ran:
            start, took = at + (record.start - first) * 1e6, (record.end - record.start) * 1e6
            yield _Bar(joined.get(id(record)), record.name, start, took)
        at += (last - first) * 1e6 * (1 + _SPACE)


def _one_after_the_other(result: Result) -> Iterator[_Bar]:
    at = 0.0
    kernels = roofline.kernels(result)
    profiled = [line for line in kernels if line.kernel.device_time_us is not None]
    for line in profiled or kernels:
        took = line.kernel.device_time_us if profiled else line.roofline_time_us
        if took is None:
            return  # without its length, later bars have no position
        yield _Bar(line.index, line.kernel.name, at, took)
        at += took


def _packed(implementation: str, drawn: Sequence[_Bar]) -> dict[str, Any]:
    starts = [round(bar.start * 1e3) for bar in drawn]
    took = [round(bar.took * 1e3) for bar in drawn]
    ends = [0, *map(operator.add, starts, took)]
    return {
        "implementation": implementation, "index": [bar.kernel for bar in drawn],
        "gap": list(map(operator.sub, starts, ends)), "took": took,
        "helpers": {str(i): formats.runtime(bar.name) for i, bar in enumerate(drawn) if bar.kernel is None},
    }
