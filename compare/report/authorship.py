"""Lines of code of each implementation, next to its speed against the baseline."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..base.text import number, printable
from ..sources.row import Row
from ..spec.blocks import BLOCKS
from .columns import BASELINE, Column
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
        cell=lambda row: "" if row.speedup_vs_xla is None else f"{number(row.speedup_vs_xla)}x",
    ),
)


@dataclass(frozen=True)
class Authorship:
    """The lines of a block's implementation, and its speed; the attributes are those of COLUMNS.

    Lines are None where this installation lacks the source, the speedup where no case has both times.
    """

    block: str
    implementation: str
    kernel_lines: int | None
    other_lines: int | None
    cases: int
    speedup_vs_xla: float | None


def of(rows: Iterable[Row]) -> list[Authorship]:
    """Return the authorship of each block and implementation."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.block, row.implementation), []).append(row)
    return [_of(block, name, members) for (block, name), members in groups.items()]


def render(found: Sequence[Authorship], *, markdown: bool = False) -> str:
    sections = []
    for block in dict.fromkeys(line.block for line in found):
        title = f"## {escaped(printable(block))}\n" if markdown else printable(block)
        members = [line for line in found if line.block == block]
        sections.append(f"{title}\n{table(members, COLUMNS[1:], markdown)}")
    return "\n\n".join([*sections, *explained(LEGEND, markdown)]) if sections else "no records"


def _of(block: str, implementation: str, rows: list[Row]) -> Authorship:
    ratios = [ratio for row in rows if (ratio := row.time_vs_xla)]
    lines = _lines(block, implementation)
    return Authorship(
        block, implementation, None if lines is None else lines.kernel, None if lines is None else lines.other,
        len(ratios),
        math.exp(-sum(map(math.log, ratios)) / len(ratios)) if ratios else None,
    )


def _lines(block: str, implementation: str) -> Lines | None:
    try:
        return lines_of(BLOCKS[block].implementation(implementation))
    except LookupError:
        return None  # a run of another release, or an installation without the source
