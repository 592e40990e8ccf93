"""What an implementation costs its author, in lines, beside what it gains: its speed against the baseline."""

from __future__ import annotations

import math
from collections.abc import Iterable

from ..base.text import number, printable
from ..spec.blocks import BLOCKS
from .kernel_lines import Lines, lines_of
from .rows import BASELINE, Row
from .table import Columns, escaped, explained, table

LEGEND = (
    "kernel lines: what runs on the GPU (Triton functions, CUDA files). other lines: Python around them, or all there",
    "is of a block that a compiler takes. Without comments, docstrings and blank lines; as in this installation.",
    f"speed: geometric mean of {BASELINE}'s device time over its own, over the cases that both have in one segment.",
    "cases: how many those are; speeds of one block over different numbers of cases are means over different cases.",
)
_COLUMNS: Columns = {
    "implementation": lambda r: printable(str(r["implementation"]), 40),
    "kernel lines": lambda r: number(r["kernel_lines"]),
    "other lines": lambda r: number(r["other_lines"]),
    "cases": lambda r: number(r["cases"]),
    f"speed / {BASELINE}": lambda r: "" if r["speed"] is None else f"{number(r['speed'])}x",
}


def of(rows: Iterable[Row]) -> list[Row]:
    """A row for each block and implementation.

    {"block", "implementation", "kernel_lines", "other_lines", "cases", "speed"}: lines are None where this installation
    does not have them; cases: how many the speed is of; None without any.
    """
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["block"], row["implementation"]), []).append(row)
    return [_row(block, name, members) for (block, name), members in groups.items()]


def render(found: list[Row], *, markdown: bool = False) -> str:
    sections = []
    for block in dict.fromkeys(row["block"] for row in found):
        title = f"## {escaped(printable(block))}\n" if markdown else printable(block)
        members = [row for row in found if row["block"] == block]
        sections.append(f"{title}\n{table(members, _COLUMNS, markdown)}")
    return "\n\n".join([*sections, *explained(LEGEND, markdown)]) if sections else "no records"


def _row(block: str, implementation: str, rows: list[Row]) -> Row:
    ratios = [row["time_vs_xla"] for row in rows if row["time_vs_xla"]]
    lines = _lines(block, implementation)
    return {
        "block": block, "implementation": implementation,
        "kernel_lines": None if lines is None else lines.kernel,
        "other_lines": None if lines is None else lines.other,
        "cases": len(ratios),
        "speed": math.exp(-sum(map(math.log, ratios)) / len(ratios)) if ratios else None,
    }


def _lines(block: str, implementation: str) -> Lines | None:
    try:
        return lines_of(BLOCKS[block].implementation(implementation))
    except LookupError:
        return None  # a run of another release, or an installation without its source
