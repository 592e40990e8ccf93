"""Rows as one matrix: a line for each case and direction, a column for each implementation.

A cell holds the device time, or the number of compiled kernels in a run for a GPU that the machine lacks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from ..base.text import number, printable
from ..sources.row import Row
from .columns import marks, marks_explained
from .table import escaped, explained, title

TIMES = "*: smallest median of its line and segment. A lead within the spread (see the full table) may be noise."
KERNELS = "Nothing ran on a GPU. checked: nothing to compile for the target; its numbers are right on the CPU."
_VALID = ("ok", "compiled")


def render(rows: Sequence[Row], *, markdown: bool = False) -> str:
    """Return the matrix. A cell without a number has the record's status; without a record it is empty."""
    from tabulate import tabulate

    if not rows:
        return "no records"
    names = list(dict.fromkeys(str(row.implementation) for row in rows))
    lines: dict[str, dict[str, Row]] = {}
    for row in rows:
        lines.setdefault(title(row), {})[str(row.implementation)] = row
    timed = any(row.device_time_us is not None for row in rows)
    cell: Callable[[Row, dict[str, Row]], str] = _time if timed else _kernels
    body = [
        [label, *(cell(members[name], members) if name in members else "" for name in names)]
        for label, members in lines.items()
    ]
    headers = ["device time, µs" if timed else "kernels", *(printable(name, 40) for name in names)]
    if markdown:
        headers, body = [escaped(h) for h in headers], [[escaped(cell) for cell in line] for line in body]
    table = tabulate(
        body, headers=headers, tablefmt="github" if markdown else "simple", disable_numparse=True,
        colalign=["left"] + ["right"] * len(names),
    )
    legend = [TIMES, *marks_explained(rows)] if timed else [KERNELS]
    return "\n\n".join([table, *explained(legend, markdown)])


def _kernels(row: Row, members: dict[str, Row]) -> str:
    return str(row.kernels) if counts(row) else outcome(row)


def counts(row: Row) -> bool:
    """Return whether the kernels compute the case: not where the record is wrong or its check failed."""
    return bool(row.kernels) and (row.status in _VALID or outcome(row) == "checked")


def outcome(row: Row) -> str:
    """Return the text of a cell without a number. checked: eager PyTorch, which has nothing to compile for a target."""
    right = row.status == "skipped" and row.checked("device") is not None
    return "checked" if right else printable(str(row.status), 20)


def _time(row: Row, members: dict[str, Row]) -> str:
    time = row.device_time_us
    if time is None:
        return printable(str(row.status), 20)
    return " ".join(filter(None, [number(time), ("*" if is_fastest(row, members.values()) else "") + marks(row)]))


def is_fastest(row: Row, members: Iterable[Row]) -> bool:
    """Return whether the row has the smallest median among several of its line, by one clock in one segment."""
    rivals = [
        other.device_time_us for other in members
        if other.device_time_us is not None and (other.segment, other.timer) == (row.segment, row.timer)
    ]
    return len(rivals) > 1 and row.device_time_us == min(rivals)
