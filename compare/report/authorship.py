"""Lines of code of each implementation, next to its speed against the baseline."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

from ..base.text import number, printable
from ..sources.row import Row
from ..spec.blocks import BLOCKS
from .columns import BASELINE, Column
from .kernel_lines import lines_of
from .table import grouped

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


render = partial(grouped, columns=COLUMNS[1:], legend=LEGEND, heading=lambda line: printable(line.block))


def _of(block: str, implementation: str, rows: list[Row]) -> Authorship:
    ratios = [ratio for row in rows if (ratio := row.time_vs_xla)]
    speedup = math.exp(-sum(map(math.log, ratios)) / len(ratios)) if ratios else None
    kernel = other = None
    try:
        lines = lines_of(BLOCKS[block].implementation(implementation))
        kernel, other = lines.kernel, lines.other
    except LookupError:
        pass  # a run of another release, or an installation without the source
    return Authorship(block, implementation, kernel, other, len(ratios), speedup)
