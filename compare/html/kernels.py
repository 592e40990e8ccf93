"""The kernels of a case on one time axis, and as tables."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from compare.graph import formats, show
from compare.graph.join import assign
from compare.graph.model import Kernel
from compare.html.charts import kind
from compare.html.reading import CaseOf, Member
from compare.report.rows import Row

MOST = 200  # kernels of an implementation in its table
_SPACE = 0.01  # between a step's two parts, of the longest call


def where(kernel: Kernel) -> str:
    """Of a kernel, the first stages of the program that are in it, else its first line."""
    named = [formats.name(stage, 32) for stage in kernel.stages[:3]]
    more = ", …" if len(kernel.stages) > len(named) else ""
    return ", ".join(named) + more if named else "".join(map(formats.place, kernel.lines[:1]))


def bars(case: CaseOf) -> list[dict[str, Any]]:
    """Of a timed case what ran in a median call, with its times; else what each kernel takes at least, one after the
    other. Backward begins where forward ends."""
    found: list[dict[str, Any]] = []
    for member in case.ranked:
        found += _measured(member) if case.timed else _least(member)
    return found


def _measured(member: Member) -> Iterator[dict[str, Any]]:
    joined: dict[int, int] = {}
    if member.graph is not None and member.graph.kernels:
        kernels, _ = assign(member.graph, member.ran)
        joined = {id(record): index for index, records in kernels.items() for record in records}
    at = 0.0
    for ran in member.ran.values():
        first, last = min((r.start for r in ran), default=0.0), max((r.end for r in ran), default=0.0)
        for record in ran:
            index = joined.get(id(record))
            start, took = at + (record.start - first) * 1e6, (record.end - record.start) * 1e6
            yield _bar(member, index, record.name, start, took)
        at += (last - first) * 1e6 * (1 + _SPACE)


def _least(member: Member) -> Iterator[dict[str, Any]]:
    at = 0.0
    for row in member.kernels:
        if row["floor_us"] is None:
            return  # where one is not known, the next ones have no place
        yield _bar(member, row["index"], row["kernel"], at, row["floor_us"])
        at += row["floor_us"]


def _bar(member: Member, index: int | None, ran_as: str, start: float, took: float) -> dict[str, Any]:
    """index: of the kernel, whose line in the table has the rest; None of what only helps one: memsets, copies, what a
    library adds."""
    bar = {"implementation": member.name, "index": index, "start": round(start, 3), "end": round(start + took, 3)}
    if index is None or member.graph is None or member.graph.kernels is None:
        return {**bar, "kind": "other", "kernel": f"{formats.runtime(ran_as)} (helps another kernel)"}
    return {**bar, "kind": kind(member.graph.kernels[index].kind)}


def table(member: Member) -> dict[str, Any]:
    """{"many": in words, "rows": [...] in launch order, "hidden": how many of less cost are left out}."""
    assert member.graph is not None
    kept = set(show.costliest(member.graph, MOST))
    listed = [_line(member, row) for row in member.kernels if row["index"] in kept]
    many = len(member.kernels)
    return {"many": formats.count(many, "kernel"), "rows": listed, "hidden": many - len(listed)}


def _line(member: Member, row: Row) -> dict[str, Any]:
    assert member.graph is not None and member.graph.kernels is not None
    kernel = member.graph.kernels[row["index"]]
    return {
        "index": row["index"], "name": formats.name(kernel.name, 70), "kind": kernel.kind, "part": kernel.part,
        "stages": ", ".join(formats.name(stage, 40) for stage in kernel.stages[:6]),
        "lines": [formats.place(line) for line in kernel.lines[:4]],
        "launches": row["launches"], "read": kernel.bytes_read, "written": kernel.bytes_written,
        "time": row["device_time_us"], "least": row["floor_us"], "recoverable": row["recoverable_us"],
        "bound": row["bound"], "provenance": kernel.provenance,
    }  # fmt: skip
