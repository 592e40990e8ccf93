"""Rows as one matrix: a line for each case and direction, a column for each implementation.

A cell holds the device time, or in a run for a GPU that the machine lacks the number of compiled kernels, and the time
that is recorded or predicted for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from ..base.text import escaped, number, printable
from ..sources.row import Row
from .columns import marks, marks_explained, unmeasured_time
from .table import explained, title

TIMES = "*: smallest median of its line and segment. A lead within the spread (see the full table) may be noise."
KERNELS = "Nothing ran on a GPU. checked: nothing to compile for the target; its numbers are right on the CPU."
KNOWN = "µs: recorded on the target for the same kernels; ~: predicted (docs/predicted-times.md)."
_VALID = ("ok", "compiled")

Members = Mapping[str, Row]  # the rows of a line by implementation


def render(rows: Sequence[Row], *, markdown: bool = False) -> str:
    """Return the matrix. A cell without a number has the record's status; without a record it is empty."""
    if not rows:
        return "no records"
    if any(row.device_time_us is not None for row in rows):
        table = grid(rows, "device time, µs", title, _time, markdown)
        legend = [TIMES, *marks_explained(rows)]
    else:
        known = any(unmeasured_time(row) for row in rows)
        table = grid(rows, "kernels · µs" if known else "kernels", title, _kernels, markdown)
        legend = [KERNELS, *([KNOWN] if known else [])]
    return "\n\n".join([table, *explained(legend, markdown)])


def grid(
    rows: Sequence[Row], corner: str, label: Callable[[Row], str], cell: Callable[[Row, Members], str],
    markdown: bool = False,
) -> str:
    """Return a line for each label and a column for each implementation.

    cell: returns the text of a row, given all rows of its line by implementation.
    """
    from tabulate import tabulate

    names = list(dict.fromkeys(str(row.implementation) for row in rows))
    lines: dict[str, dict[str, Row]] = {}
    for row in rows:
        lines.setdefault(label(row), {})[str(row.implementation)] = row
    texts = [[corner, *(printable(name, 40) for name in names)]]
    for start, members in lines.items():
        texts.append([start, *(cell(members[name], members) if name in members else "" for name in names)])
    if markdown:
        texts = [[escaped(text) for text in line] for line in texts]
    return tabulate(
        texts[1:], headers=texts[0], tablefmt="github" if markdown else "simple", disable_numparse=True,
        colalign=["left"] + ["right"] * len(names),
    )


def _kernels(row: Row, members: Members) -> str:
    return " · ".join(filter(None, (str(row.kernels), unmeasured_time(row)))) if counts(row) else outcome(row)


def counts(row: Row) -> bool:
    """Return whether the kernels compute the case: not where the record is wrong or its check failed."""
    return bool(row.kernels) and (row.status in _VALID or outcome(row) == "checked")


def outcome(row: Row) -> str:
    """Return the text of a cell without a number. checked: eager PyTorch, which has nothing to compile for a target."""
    right = row.status == "skipped" and row.checked("device") is not None
    return "checked" if right else printable(str(row.status), 20)


def _time(row: Row, members: Members) -> str:
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
