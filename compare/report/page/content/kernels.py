"""The kernels of a case on one time axis, and those of each GPU of a case that spans several."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from ....base.exchange_kernels import moves_between_gpus
from ....base.text import printable
from ....graph import formats
from ....graph.join.kernel_records import assign
from ....graph.model import Kernel
from ....measure import timeline
from ....record.record import Record
from ....record.run_files import recorded_file
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

    A timed case shows the launches of a median call. Otherwise each kernel's time comes after the last one's: as in a
    profile; else predicted, if all kernels of the case are; else the roofline time. Backward begins where forward ends.
    "index": the kernel's position in launch order; null for a helper launch (a memset, a copy, or one that a library
    adds), whose name is in "helpers" by the bar's position. "gap" and "took": the time since the end of the last bar,
    and the bar's length, ns.
    """
    expected = predicted(case)
    bars_of_results = []
    for result in case.ranked:
        drawn = list(_measured(result) if case.timed else _one_after_the_other(result, expected))
        if drawn:
            bars_of_results.append({**_packed(result.name, drawn), "predicted": expected})
    return bars_of_results


def predicted(case: CaseResults) -> bool:
    """Return whether nothing of the case was measured, and all its kernels have predicted times."""
    graphs = [result.timed_graph for result in case.results]
    kernels = [kernel for graph in graphs if graph is not None for kernel in graph.kernels or ()]
    return bool(kernels) and not case.timed and all(
        kernel.device_time_us is None and kernel.predicted_us is not None for kernel in kernels
    )


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


def _one_after_the_other(result: Result, expected: bool) -> Iterator[_Bar]:
    at = 0.0
    kernels = roofline.kernels(result, predict=expected)
    profiled = [line for line in kernels if line.kernel.device_time_us is not None]
    for line in profiled or kernels:
        compiled = line.kernel.predicted_us if expected else line.roofline_time_us
        took = line.kernel.device_time_us if profiled else compiled
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


class CallsOfRanks(NamedTuple):
    """bars: the kernels, copies and memsets of one call of each implementation with a timeline (charts.ranks).

    missing: the reason of each implementation with times but without a timeline.
    """

    bars: list[dict[str, Any]]
    missing: list[str]


def calls_of_ranks(case: CaseResults) -> CallsOfRanks:
    """Return one call of each implementation, from the run's timelines."""
    bars: list[dict[str, Any]] = []
    missing: list[str] = []
    for result in case.ranked:
        record = result.record
        if record is None or record.parallel is None:
            continue
        try:
            bars += _bars_of_ranks(result, _launches_of_ranks(result, record))
        except ValueError as problem:
            missing.append(printable(f"{result.name}: {problem}", 300))
    return CallsOfRanks(bars, missing if bars else [])


def _launches_of_ranks(result: Result, record: Record) -> list[list[timeline.Event]]:
    """Return what each rank ran. Raises ValueError without a readable timeline."""
    trace = record.trace
    if trace is None or trace.file is None:
        raise ValueError(trace.unavailable if trace else "no timeline")
    return timeline.launches_of_ranks(timeline.load(recorded_file(result.path, record, trace.file)))


def _bars_of_ranks(result: Result, launches: Sequence[Sequence[timeline.Event]]) -> Iterator[dict[str, Any]]:
    """Yield a bar for each launch, in order of rank and time. Time 0 is the start of the first kernel of any rank."""
    named = {kernel.name: index for index, kernel in enumerate((result.graph and result.graph.kernels) or ())}
    first = min((event["ts"] for events in launches for event in events), default=0.0)
    for rank, events in enumerate(launches):
        for event in sorted(events, key=lambda event: event["ts"]):
            at_run_time = event["args"]["runtime_name"]
            start = event["ts"] - first
            yield {
                "implementation": result.name, "rank": rank,
                "kind": "communication" if moves_between_gpus(at_run_time) else "compute",
                "kernel": _name_of_launch(event["name"], at_run_time), "start": round(start, 3),
                "end": round(start + event["dur"], 3), "index": named.get(event["name"]),
            }


def _name_of_launch(in_graph: str, at_run_time: str) -> str:
    """Return both names of a kernel. A copy has its operation's name in the graph."""
    shown = formats.runtime(at_run_time)
    return shown if in_graph == at_run_time else f"{formats.name(in_graph, 60)}: {shown}"
