"""Rows to tables: one for each case and direction, in plain text or Markdown. Units are formatted here."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from ..base.text import number, printable
from ..spec.dtype import DTYPES
from .rows import Row

Columns = dict[str, Callable[[Row], str]]

LEGEND = (
    "time: device time of a call from a cold L2 cache, median of all samples ± half their interquartile range.",
    "gaps: share of the time in which nothing ran.",
    "against xla: from paired rounds, with a 95% interval; depends on the timer: two timers name opposite winners.",
    "warm: from a warm L2. as graph: replayed as one. by launch: each by itself, where the default is a graph.",
    "of peak: rate over what a plain stream or product reached on this device in the same segment.",
    "error: largest error over its tolerance; above 1 is wrong. wall: host time a call. memory: peak above the inputs.",
)
NO_MEMORY = (
    "memory: p marks a peak that XLA's compiler planned; it was not measured. Blank: neither measured nor planned. "
    "--json says why (peak_memory_reason)."
)
# By mark beside a time: the field that counts the rounds, and what it says of them.
_MARKS = {
    "!": ("throttled_rounds", "in some round the GPU said that it was throttled."),
    "~": ("unsettled_rounds", "in some round the times were still changing when the warm-up ended."),
}


def render(rows: list[Row], *, markdown: bool = False) -> str:
    """Every row, grouped; columns that a group has nothing for are left out."""
    legend: list[str] = []
    if any(row["device_time_us"] is not None for row in rows):
        legend = [*LEGEND, *marks_explained(rows)]
        if any(row["peak_memory_reason"] for row in rows):
            legend.append(NO_MEMORY)
    return grouped(rows, _columns, legend, markdown=markdown, summary=_summary(rows), notes=_notes)


def grouped(
    rows: list[Row], columns: Callable[[list[Row]], Columns], legend: Sequence[str], *, markdown: bool,
    summary: str = "", notes: Callable[[list[Row], bool], list[str]] = lambda rows, markdown: [],
) -> str:
    """A table for each case and direction, with its notes, and the legend below all of them."""
    if not rows:
        return "no records"
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(title(row), []).append(row)
    sections = [summary] if summary else []
    for label, members in groups.items():
        heading = f"## {escaped(label)}\n" if markdown else label
        sections.append("\n".join([heading, table(members, columns(members), markdown), *notes(members, markdown)]))
    sections += explained(legend, markdown)
    return "\n\n".join(sections)


def memory(row: Row) -> str:
    """Peak memory in MB, marked where XLA's compiler planned it and nothing measured it."""
    planned = row["peak_memory_planned_bytes"]
    return mega(row["peak_memory_bytes"]) if planned is None else f"{mega(planned)} p"


def explained(legend: Sequence[str], markdown: bool) -> list[str]:
    """The legend as one section, or nothing."""
    return ["\n".join(f"- {escaped(line)}" if markdown else line for line in legend)] if legend else []


def title(row: Row) -> str:
    dtype = DTYPES[row["dtype"]].short
    precision = "" if row["precision"] == "ieee" else f" {row['precision']}"
    return printable(f"{row['block']} / {row['case']} / {dtype}{precision} / {row['direction']}")


def _summary(rows: list[Row]) -> str:
    statuses = Counter(row["status"] for row in rows)
    return f"{len(rows)} records: " + ", ".join(f"{count} {status}" for status, count in statuses.items())


def table(rows: list[Row], columns: Columns, markdown: bool) -> str:
    """A line a row; columns that have nothing in them are left out."""
    from tabulate import tabulate

    cells = {name: [cell(row) for row in rows] for name, cell in columns.items()}
    cells = {name: column for name, column in cells.items() if any(column)}
    if markdown:
        cells = {name: [escaped(text) for text in column] for name, column in cells.items()}
    return tabulate(
        list(zip(*cells.values(), strict=True)),
        headers=list(cells),
        tablefmt="github" if markdown else "simple",
        disable_numparse=True,
        colalign=["left" if name in _WORDS else "right" for name in cells],
    )


_WORDS = ("block", "implementation", "status", "checked on", "provenance", "segment", "kernel", "bound")


def _columns(rows: list[Row]) -> Columns:
    columns: Columns = {
        "implementation": lambda r: printable(str(r["implementation"]), 40),
        "status": lambda r: printable(str(r["status"]), 20),
        "checked on": checked_on,
        "kernels": lambda r: number(r["kernels"]),
        "time µs": _time,
        "±": lambda r: number(r["device_time_us_spread"], 2),
    }
    if any(r["backward_us"] is not None for r in rows):
        columns |= {
            "forward": lambda r: number(r["forward_us"]),
            "backward": lambda r: number(r["backward_us"]),
        }
    columns |= {
        "against xla": lambda r: r["verdict_vs_xla"] or "",
        "warm": lambda r: number(r["warm_time_us"]),
        "as graph": lambda r: number(r["graph_time_us"]),
        "by launch": lambda r: number(r["launches_time_us"]),
        "gaps": lambda r: percent(r["launch_gap"]) if (r["launch_gap"] or 0) >= _SHOWN_GAP else "",
        "rate": lambda r: "" if r["rate"] is None else f"{number(r['rate'])} {r['rate_unit']}",
        "of peak": lambda r: "" if r["share_of_ceiling"] is None else f"{r['share_of_ceiling']:.0%}",
        "wall µs": lambda r: number(r["wall_time_us"]),
        "moved MB": lambda r: mega(r["bytes_moved"]),
        "least MB": lambda r: mega(r["bytes_compulsory"]),
        "counted MB": lambda r: mega(r["dram_bytes_call"]),
        "memory MB": memory,
        "compile s": lambda r: number(r["compile_s"], 2),
        "error": _error,
        "provenance": lambda r: "" if r["provenance"] in (None, "compiled") else printable(r["provenance"], 40),
    }
    if len({r["segment"] for r in rows}) > 1:
        columns["segment"] = lambda r: printable(str(r["segment"] or ""), 20)
    return columns


_SHOWN_GAP = 0.005


def _time(row: Row) -> str:
    return " ".join(filter(None, [number(row["device_time_us"]), marks(row)]))


def marks(row: Row) -> str:
    """What is to be said of a time's rounds, a character each."""
    return "".join(mark for mark, (field, _) in _MARKS.items() if row[field])


def marks_explained(rows: Sequence[Row]) -> list[str]:
    """A line for each mark that some row has."""
    return [f"{mark}: {words}" for mark, (field, words) in _MARKS.items() if any(row[field] for row in rows)]


def checked_on(row: Row) -> str:
    """The device of the check, with what sets it apart: a dtype that is not the case's own, Triton's interpreter."""
    checked = row["checked"]
    if not checked:
        return ""
    dtype = checked.get("dtype")
    remarks = ["interpreter"] if checked.get("backend") == "interpreter" else []
    if dtype not in (None, row["dtype"]):
        remarks.append(DTYPES[dtype].short if dtype in DTYPES else str(dtype))
    device = str(checked.get("device", "?"))
    return printable(f"{device} ({', '.join(remarks)})" if remarks else device, 40)


def _error(row: Row) -> str:
    if row["max_error"] is None:
        return ""
    if not math.isfinite(row["max_error"]):
        return str(row["max_error"])
    return f"{row['max_error'] / row['tolerance']:.2f}" if row["tolerance"] else f"{row['max_error']:.1e} of 0"


def mega(value: float | None) -> str:
    """Millions."""
    return number(None if value is None else value / 1e6)


def percent(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"


def _notes(rows: list[Row], markdown: bool) -> list[str]:
    said = [(row, (row["detail"] and f"{row['status']}: {row['detail']}", row["modes_unavailable"])) for row in rows]
    return noted(((row, what) for row, notes in said for what in notes), markdown)


def noted(said: Iterable[tuple[Row, str | None]], markdown: bool) -> list[str]:
    """Lines below a table: of which implementation, and what is said of it; nothing where that is empty."""
    lines = []
    for row, what in said:
        if what:
            note = printable(f"{row['implementation']}: {what}")
            lines.append(f"- {escaped(note)}" if markdown else f"  {note}")
    return ["", *lines] if markdown and lines else lines


def escaped(text: str) -> str:
    """Markdown and HTML shown as text."""
    return re.sub(r"([\\`*_\[\]|#~])", r"\\\1", text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;"))
