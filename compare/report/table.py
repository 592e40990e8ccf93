"""Rows to tables: one for each case and direction, in plain text or Markdown. Units are formatted here."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable

from compare.report import printable
from compare.report.rows import Row
from compare.spec import DTYPES

LEGEND = (
    "time: device time of a call from a cold L2 cache, median of all samples ± half their interquartile range.",
    "/ xla: time over xla's on the same case, segment and timer; below 1 is faster.",
    "of peak: rate over what a plain stream or product reached on this device in the same segment.",
    "error: largest error over its tolerance; above 1 is wrong. wall: host time a call. memory: peak above the inputs.",
)


def render(rows: list[Row], *, markdown: bool = False) -> str:
    """Every row, grouped; columns that a group has nothing for are left out."""
    if not rows:
        return "no records"
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(title(row), []).append(row)
    sections = [_summary(rows)]
    for label, members in groups.items():
        heading = f"## {escaped(label)}\n" if markdown else label
        sections.append("\n".join([heading, _table(members, markdown), *_notes(members, markdown)]))
    if any(row["device_time_us"] is not None for row in rows):
        sections.append("\n".join(f"- {line}" if markdown else line for line in LEGEND))
    return "\n\n".join(sections)


def title(row: Row) -> str:
    dtype = DTYPES[row["dtype"]].short
    precision = "" if row["precision"] == "ieee" else f" {row['precision']}"
    return printable(f"{row['block']} / {row['case']} / {dtype}{precision} / {row['direction']}")


def _summary(rows: list[Row]) -> str:
    statuses = Counter(row["status"] for row in rows)
    return f"{len(rows)} records: " + ", ".join(f"{count} {status}" for status, count in statuses.items())


def _table(rows: list[Row], markdown: bool) -> str:
    from tabulate import tabulate

    cells = {name: [cell(row) for row in rows] for name, cell in _columns(rows).items()}
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


_WORDS = ("implementation", "status", "checked on", "provenance", "segment")


def _columns(rows: list[Row]) -> dict[str, Callable[[Row], str]]:
    columns: dict[str, Callable[[Row], str]] = {
        "implementation": lambda r: printable(str(r["implementation"]), 40),
        "status": lambda r: printable(str(r["status"]), 20),
        "checked on": _checked,
        "kernels": lambda r: number(r["kernels"]),
        "time µs": lambda r: number(r["device_time_us"]),
        "±": lambda r: number(r["device_time_us_spread"], 2),
    }
    if any(r["backward_us"] is not None for r in rows):
        columns |= {
            "forward": lambda r: number(r["forward_us"]),
            "backward": lambda r: number(r["backward_us"]),
        }
    columns |= {
        "against xla": lambda r: r["verdict_vs_xla"] or "",
        "rate": lambda r: "" if r["rate"] is None else f"{number(r['rate'])} {r['rate_unit']}",
        "of peak": lambda r: "" if r["share_of_ceiling"] is None else f"{r['share_of_ceiling']:.0%}",
        "wall µs": lambda r: number(r["wall_time_us"]),
        "moved MB": lambda r: number(None if r["bytes_moved"] is None else r["bytes_moved"] / 1e6),
        "least MB": lambda r: number(None if r["bytes_compulsory"] is None else r["bytes_compulsory"] / 1e6),
        "memory MB": lambda r: number(None if r["peak_memory_bytes"] is None else r["peak_memory_bytes"] / 1e6),
        "compile s": lambda r: number(r["compile_s"], 2),
        "error": _error,
        "provenance": lambda r: "" if r["provenance"] in (None, "compiled") else printable(r["provenance"], 40),
    }
    if len({r["segment"] for r in rows}) > 1:
        columns["segment"] = lambda r: printable(str(r["segment"] or ""), 20)
    return columns


def _checked(row: Row) -> str:
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


def number(value: float | None, digits: int = 3) -> str:
    """Significant digits without an exponent, integers whole."""
    if value is None:
        return ""
    if isinstance(value, int) or not math.isfinite(value) or value == 0:
        return f"{value:g}" if isinstance(value, float) else str(value)
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{value:.{decimals}f}"


def _notes(rows: list[Row], markdown: bool) -> list[str]:
    lines = []
    for row in rows:
        if row["detail"]:
            note = printable(f"{row['implementation']}: {row['status']}: {row['detail']}")
            lines.append(f"- {escaped(note)}" if markdown else f"  {note}")
    return ["", *lines] if markdown and lines else lines


def escaped(text: str) -> str:
    """Markdown and HTML shown as text."""
    return re.sub(r"([\\`*_\[\]|#~])", r"\\\1", text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;"))
