"""A run of few implementations at a glance: for inference and for training, a row a block.

A cell has an implementation's kernels, its declared bytes over the compulsory bytes, and its device time in µs:
measured; else recorded, where the compile gave kernels that ran on the target; else predicted, with a ~.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial

from ..base.text import number, printable
from ..sources.row import Row
from .columns import marks, marks_explained, unmeasured_time
from .matrix import Members, counts, grid, is_fastest, outcome

MOST_IMPLEMENTATIONS = 4
NO_TIME = "-"


def fits(rows: Sequence[Row]) -> bool:
    """Return whether the rows have at most MOST_IMPLEMENTATIONS, and one case of each block and direction."""
    cells = Counter((row.block, row.direction, row.implementation) for row in rows)
    return len({row.implementation for row in rows}) <= MOST_IMPLEMENTATIONS and max(cells.values(), default=0) == 1


def render(rows: Sequence[Row], device: str | None) -> str:
    """Return both tables and their legend. device: the GPU of the times; None for a target without recorded times."""
    timed = any(row.device_time_us is not None for row in rows)
    parts = []
    for title, inference in (("inference", True), ("training", False)):
        if members := [row for row in rows if (row.direction == "fwd") == inference]:
            parts.append(grid(members, title, _label, partial(_cell, timed=timed)))
    if not timed and device is None:
        why = _counted(row.predicted.reason for row in rows if row.predicted is not None)
        untimed = f"Each cell: kernels, declared bytes / compulsory bytes. {NO_TIME}: nothing is timed"
        return "\n\n".join([*parts, f"{untimed} ({why})." if why else f"{untimed}."])
    time = "device time in µs" if timed else f"device time in µs, recorded on an {device} or predicted for it (~)"
    legend = [f"Each cell: kernels, declared bytes / compulsory bytes, {time}."]
    if timed:
        legend += ["*: smallest median of its row. A lead within the spread may be noise.", *marks_explained(rows)]
    else:
        legend.append(_recorded(rows))
    return "\n\n".join([*parts, "\n".join(legend)])


def _label(row: Row) -> str:
    return printable(row.block if row.direction != "joint" else f"{row.block}, joint", 40)


def _cell(row: Row, members: Members, timed: bool) -> str:
    if not counts(row) and not (timed and row.device_time_us is not None):
        return outcome(row)
    declared, compulsory = row.bytes_declared, row.bytes_compulsory
    factor = f"{declared / compulsory:.1f}x" if declared is not None and compulsory else "?"
    kernels = "?" if row.kernels is None else row.kernels
    return f"{kernels:>2} {factor:>6} {_time(row, members, timed):>8}"


def _time(row: Row, members: Members, timed: bool) -> str:
    if not timed:
        return unmeasured_time(row) or NO_TIME
    if row.device_time_us is None:
        return ""
    return f"{number(row.device_time_us)}{'*' if is_fastest(row, members.values()) else ''}{marks(row)}"


def _recorded(rows: Sequence[Row]) -> str:
    """Return the count of recorded and of predicted times, with the reasons why they are not recorded, or missing."""
    compiled = [row for row in rows if row.status == "compiled"]
    others = [row for row in compiled if row.recorded_time_us is None]
    missing = [row for row in others if row.predicted_time_us is None]
    known = len(compiled) - len(others)
    lines = [f"The times of {known} of {len(compiled)} programs were recorded on the GPU."]
    if len(others) > len(missing):
        why = _counted(row.recorded_time_reason for row in others if row.predicted_time_us is not None)
        lines.append(f"~: predicted from the compiled kernels; they have no recorded time ({why}).")
    if missing:
        why = _counted(row.predicted.reason if row.predicted else "no graph with kernels" for row in missing)
        lines.append(f"{NO_TIME}: no time ({why}).")
    return "\n".join(lines)


def _counted(reasons: Iterable[str | None]) -> str:
    return "; ".join(f"{count} {reason}" for reason, count in Counter(reasons).items())
