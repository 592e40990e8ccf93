"""Lines of code of each implementation, next to its speed against the baseline."""

from __future__ import annotations

import math
from collections.abc import Iterable

from ..base.text import number, printable
from ..spec.blocks import BLOCKS
from .columns import BASELINE, Column, Row
from .kernel_lines import Lines, lines_of
from .table import escaped, explained, table

LEGEND = (
    "kernel lines: code that runs on the GPU (Triton functions, CUDA files). other lines: the Python code around it,",
    "or the whole block where a compiler makes the kernels. Comments, docstrings and blank lines do not count.",
    f"speedup / {BASELINE}: geometric mean of {BASELINE}'s device time over its own, over cases in the same segment.",
    "cases: their number. Speedups over different numbers of cases are means over different cases.",
)
COLUMNS = (
    Column("block", "", "the computation", "block"),
    Column("implementation", "", "whose code", "implementation"),
    Column("kernel_lines", "lines", "lines of code that runs on the GPU", "kernel lines"),
    Column("other_lines", "lines", "lines of the code around it", "other lines"),
    Column("cases", "cases", "cases in the mean", "cases"),
    Column(
        "speedup_vs_xla", "ratio", f"geometric mean of {BASELINE}'s device time over its own", f"speedup / {BASELINE}",
        cell=lambda row: "" if row["speedup_vs_xla"] is None else f"{number(row['speedup_vs_xla'])}x",
    ),
)


def of(rows: Iterable[Row]) -> list[Row]:
    """Return a row for each block and implementation, with `COLUMNS`.

    Lines are None where this installation lacks the source, the speedup where no case has both times.
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
        sections.append(f"{title}\n{table(members, COLUMNS[1:], markdown)}")
    return "\n\n".join([*sections, *explained(LEGEND, markdown)]) if sections else "no records"


def _row(block: str, implementation: str, rows: list[Row]) -> Row:
    ratios = [row["time_vs_xla"] for row in rows if row["time_vs_xla"]]
    lines = _lines(block, implementation)
    return {
        "block": block, "implementation": implementation,
        "kernel_lines": None if lines is None else lines.kernel,
        "other_lines": None if lines is None else lines.other,
        "cases": len(ratios),
        "speedup_vs_xla": math.exp(-sum(map(math.log, ratios)) / len(ratios)) if ratios else None,
    }


def _lines(block: str, implementation: str) -> Lines | None:
    try:
        return lines_of(BLOCKS[block].implementation(implementation))
    except LookupError:
        return None  # a run of another release, or an installation without the source
