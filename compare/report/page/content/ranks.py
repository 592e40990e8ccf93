"""The GPUs of a case that spans several: the numbers of each, and one call of all on one time axis."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from ....base.exchange_kernels import moves_between_gpus
from ....base.text import printable
from ....graph import formats
from ....measure import timeline
from ....record.record import Record
from ....record.run_files import recorded_file
from ....sources.case_results import CaseResults
from ....sources.result import Result
from ... import ranks


class Calls(NamedTuple):
    """bars: the kernels, copies and memsets of one call of each implementation with a timeline (charts.ranks).

    missing: the reason of each implementation with times but without a timeline.
    """

    bars: list[dict[str, Any]]
    missing: list[str]


def table(case: CaseResults) -> dict[str, Any] | None:
    """Return the table of `xlafuse inspect --view ranks`; None where no record has times of several GPUs."""
    rows = ranks.of(case.ranked)
    if not rows:
        return None
    cells = [(column, [column.text(row) for row in rows]) for column in ranks.SHOWN]
    cells = [(column, texts) for column, texts in cells if any(texts)]
    return {
        "columns": [column for column, _ in cells],
        "rows": list(zip(*(texts for _, texts in cells), strict=True)),
        "legend": " ".join(ranks.LEGEND),
    }


def calls(case: CaseResults) -> Calls:
    """Return one call of each implementation, from the run's timelines."""
    bars: list[dict[str, Any]] = []
    missing: list[str] = []
    for result in case.ranked:
        record = result.record
        if record is None or record.parallel is None:
            continue
        try:
            bars += _bars(result, _launches(result, record))
        except ValueError as problem:
            missing.append(printable(f"{result.name}: {problem}", 300))
    return Calls(bars, missing if bars else [])


def _launches(result: Result, record: Record) -> list[list[timeline.Event]]:
    """Return what each rank ran. Raises ValueError without a readable timeline."""
    trace = record.trace
    if trace is None or trace.file is None:
        raise ValueError(trace.unavailable if trace else "no timeline")
    return timeline.launches_of_ranks(timeline.load(recorded_file(result.path, record, trace.file)))


def _bars(result: Result, launches: Sequence[Sequence[timeline.Event]]) -> Iterator[dict[str, Any]]:
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
                "kernel": _name(event["name"], at_run_time), "start": round(start, 3),
                "end": round(start + event["dur"], 3), "index": named.get(event["name"]),
            }


def _name(in_graph: str, at_run_time: str) -> str:
    """Return both names of a kernel. A copy has its operation's name in the graph."""
    shown = formats.runtime(at_run_time)
    return shown if in_graph == at_run_time else f"{formats.name(in_graph, 60)}: {shown}"
