"""Rows as tables: one for each case and direction, in plain text or Markdown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ..base.text import escaped, printable
from ..sources.row import Row
from ..spec.dtype import DTYPES
from .columns import BY_NAME, Column, marks_explained

LEGEND = (
    "time: device time of a call from a cold L2 cache, median ± half the interquartile range of its calls.",
    "launch gap: share of the time in which nothing ran.",
    "compared with xla: paired rounds, 95% interval; depends on the timer: two timers name opposite winners.",
    "warm: from a warm L2. graph: all launches replayed from CUDA graphs. no graph: each kernel launched by itself.",
    "of peak: rate over the rate of a plain stream or product on this device in the same segment.",
    "error: largest error over its tolerance; above 1 is wrong. memory: peak above the inputs.",
)
LEGEND_OF_ALL = "wall: host time a call."
NO_MEMORY = (
    "memory: p marks a peak that XLA's compiler planned; it was not measured. Blank: neither measured nor planned. "
    "--json says why (peak_memory_reason)."
)
PREDICTED = (
    "~: predicted from the compiled kernels. The interval is made of the kernels' intervals, which claim to hold the "
    "time in four of five (docs/predicted-times.md)."
)
NAMES = (
    "implementation", "status", "checked_device", "kernels", "device_time_us", "device_time_us_spread",
    "recorded_time_us", "predicted_time_us", "forward_us", "backward_us", "verdict_vs_xla", "warm_time_us",
    "graph_time_us", "no_graph_time_us", "triton_launch_time_us", "launch_gap", "rate", "share_of_ceiling",
    "wall_time_us", "bytes_declared", "bytes_compulsory", "dram_bytes_call", "exposed_us", "communication_us",
    "overlap_us", "peak_memory_bytes", "compile_s", "max_error", "provenance", "segment",
)
# Left out of the tables of timed records without `every`: with them, a line is too long for a screen.
_DETAILS = (
    "checked_device", "rate", "wall_time_us", "bytes_compulsory", "dram_bytes_call", "compile_s", "provenance",
)


def render(rows: Sequence[Row], *, markdown: bool = False, every: bool = False) -> str:
    """Return a table of each case; columns without a value are left out.

    every: show details of timed records, too, such as the host's time and the compile time.
    """
    legend: list[str] = []
    if any(row.device_time_us is not None for row in rows):
        left_out = ", ".join(BY_NAME[name].header for name in _DETAILS)
        more = LEGEND_OF_ALL if every else f"--all shows more columns: {left_out}."
        legend = [*LEGEND, more, *marks_explained(rows)]
        if any(row.peak_memory_reason for row in rows):
            legend.append(NO_MEMORY)
    if any(row.predicted_time_us is not None for row in rows):
        legend.append(PREDICTED)
    statuses = Counter(row.status for row in rows)
    summary = f"{len(rows)} records: " + ", ".join(f"{count} {status}" for status, count in statuses.items())
    return grouped(
        rows, columns=lambda members: _columns(members, every), legend=legend, markdown=markdown, summary=summary,
        notes=_notes,
    )


def title(line: Any) -> str:
    """Return the case and direction of a Row, or of a line that has its row as `row`."""
    row = _row(line)
    if row.case is None:
        return printable(row.block)
    dtype = DTYPES[row.dtype].short
    precision = "" if row.precision == "ieee" else f" {row.precision}"
    return printable(f"{row.block} / {row.case_name} / {dtype}{precision} / {row.direction}")


def _row(line: Any) -> Row:
    """Return a Row, or the row of a line that has one as `row`."""
    row: Row = line if isinstance(line, Row) else line.row
    return row


def grouped(
    lines: Sequence[Any], *, columns: Sequence[Column] | Callable[[list[Any]], Sequence[Column]],
    legend: Sequence[str], markdown: bool = False, heading: Callable[[Any], str] = title, summary: str = "",
    notes: Callable[[Any], Iterable[str | None]] = lambda line: (),
) -> str:
    """Return a table for each heading, with its notes, and the legend below all of them.

    lines: rows, or parts of a record that have its row as `row`, such as its kernels. columns: of all tables, or a
    function of a table's lines. notes: those of a line, some empty; each is a line below the table.
    """
    if not lines:
        return "no records"
    groups: dict[str, list[Any]] = {}
    for line in lines:
        groups.setdefault(heading(line), []).append(line)
    sections = [summary] if summary else []
    for label, members in groups.items():
        shown = columns(members) if callable(columns) else columns
        told = [(_row(line).implementation, note) for line in members for note in notes(line) if note]
        remarks = [printable(f"{implementation}: {note}") for implementation, note in told]
        section = [f"## {escaped(label)}\n" if markdown else label, table(members, shown, markdown)]
        section += [""] if markdown and remarks else []
        section += [f"- {escaped(remark)}" if markdown else f"  {remark}" for remark in remarks]
        sections.append("\n".join(section))
    return "\n\n".join([*sections, *explained(legend, markdown)])


def explained(legend: Sequence[str], markdown: bool) -> list[str]:
    """Return the legend as one section, or nothing."""
    return ["\n".join(f"- {escaped(line)}" if markdown else line for line in legend)] if legend else []


def table(rows: Sequence[Any], columns: Sequence[Column], markdown: bool) -> str:
    """Return a line a row; columns that are blank in all rows are left out. Text is aligned left, numbers right."""
    from tabulate import tabulate

    cells = [(column, [column.text(row) for row in rows]) for column in columns]
    cells = [(column, texts) for column, texts in cells if any(texts)]
    shown = escaped if markdown else str
    return tabulate(
        list(zip(*([shown(text) for text in texts] for _, texts in cells), strict=True)),
        headers=[shown(column.header) for column, _ in cells],
        tablefmt="github" if markdown else "simple",
        disable_numparse=True,
        colalign=["right" if column.unit or column.name == "verdict_vs_xla" else "left" for column, _ in cells],
    )


def _columns(rows: list[Row], every: bool) -> list[Column]:
    timed = any(row.device_time_us is not None for row in rows)
    hidden = set() if every or not timed else set(_DETAILS)
    if all(row.phase_us("backward") is None for row in rows):
        hidden |= {"forward_us", "backward_us"}
    if len({row.segment for row in rows}) == 1:
        hidden.add("segment")
    return [BY_NAME[name] for name in NAMES if name not in hidden]


def _notes(row: Row) -> tuple[str | None, ...]:
    return (
        row.detail and f"{row.status}: {row.detail}", row.modes_unavailable,
        row.graph_inputs and f"inputs of its CUDA graphs: {row.graph_inputs}",
    )
