"""The kernels of a case on one time axis."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from ....graph import formats
from ....graph.join.kernel_records import assign
from ....graph.model import Kernel
from .reading import CaseOf, Member

_SPACE = 0.01  # between a step's two parts, of the longest call


def where(kernel: Kernel) -> str:
    """Of a kernel, the first stages of the program that are in it, else its first line."""
    named = [formats.name(stage, 32) for stage in kernel.stages[:3]]
    more = ", …" if len(kernel.stages) > len(named) else ""
    return ", ".join(named) + more if named else "".join(map(formats.place, kernel.lines[:1]))


def bars(case: CaseOf) -> list[dict[str, Any]]:
    """Of each implementation its bars: of a timed case what ran in a median call; else what each kernel takes at least,
    one after the other. Backward begins where forward ends.

    "index": the kernel's place in launch order, null of what only helps one: memsets, copies, what a library adds;
    those are named in "helps", by the bar's place. "gap" and "took": since the last bar's end, and its length, ns.
    """
    found = []
    for member in case.ranked:
        drawn = list(_measured(member) if case.timed else _least(member))
        if drawn:
            found.append(_packed(member.name, drawn))
    return found


def end_us(bars: Mapping[str, Any]) -> float:
    """Where the last bar of an implementation ends."""
    return max(accumulate(map(operator.add, bars["gap"], bars["took"]))) / 1e3


class _Bar(NamedTuple):
    """kernel: by its place in launch order; None of what only helps one. ran_as: what ran. Times in µs."""

    kernel: int | None
    ran_as: str
    start: float
    took: float


def _measured(member: Member) -> Iterator[_Bar]:
    joined: dict[int, int] = {}
    if member.graph is not None and member.graph.kernels:
        kernels, _ = assign(member.graph, member.ran)
        joined = {id(record): index for index, records in kernels.items() for record in records}
    at = 0.0
    for ran in member.ran.values():
        first, last = min((r.start for r in ran), default=0.0), max((r.end for r in ran), default=0.0)
        for record in ran:
            start, took = at + (record.start - first) * 1e6, (record.end - record.start) * 1e6
            yield _Bar(joined.get(id(record)), record.name, start, took)
        at += (last - first) * 1e6 * (1 + _SPACE)


def _least(member: Member) -> Iterator[_Bar]:
    at = 0.0
    for row in member.kernels:
        if row["floor_us"] is None:
            return  # where one is not known, the next ones have no place
        yield _Bar(row["index"], row["kernel"], at, row["floor_us"])
        at += row["floor_us"]


def _packed(implementation: str, drawn: Sequence[_Bar]) -> dict[str, Any]:
    starts = [round(bar.start * 1e3) for bar in drawn]
    took = [round(bar.took * 1e3) for bar in drawn]
    ends = [0, *map(operator.add, starts, took)]
    return {
        "implementation": implementation, "index": [bar.kernel for bar in drawn],
        "gap": list(map(operator.sub, starts, ends)), "took": took,
        "helps": {str(i): formats.runtime(bar.ran_as) for i, bar in enumerate(drawn) if bar.kernel is None},
    }
