"""The front page's matrix: a line a case, a column an implementation, each time against the best of its line.

Of a run for a GPU that is not there, the bytes that each compiler's kernels declare, against the fewest of the line.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from urllib.parse import quote

from ....base.text import number, printable
from ....graph import formats
from ....plan import paired_rounds
from ....plan.speedup import DEPENDS
from ....spec.dtype import DTYPES
from ...matrix import counts, outcome
from ...table import marks
from .reading import BASELINES, CaseOf, Member, Run

# Colours by ratio to the best: up to each bound, the level of its place; beyond the last, one more.
BOUNDS = (1.02, 1.1, 1.3, 2.0, 4.0)


@dataclass(frozen=True)
class Cell:
    """level: 0 for the best, one more for each of BOUNDS that its ratio is above; None without a ratio. mark: "tie",
    "flip" or "unresolved" against the best of the line; "" else, and for the best itself. small: below the main text.
    title: everything in words."""

    text: str
    small: str = ""
    level: int | None = None
    best: bool = False
    mark: str = ""
    title: str = ""
    status: str = ""


@dataclass(frozen=True)
class Line:
    block: str
    label: str
    href: str
    cells: tuple[Cell | None, ...]


@dataclass(frozen=True)
class Matrix:
    columns: tuple[str, ...]
    lines: tuple[Line, ...]
    timed: bool


def matrix(run: Run) -> Matrix:
    found = [{member.name: _cell(case, member, run.timed) for member in case.members} for case in run.cases]
    counts = Counter(name for cells in found for name in cells)
    wins = Counter(name for cells in found for name, cell in cells.items() if cell.best)
    # What is compared first, with most wins; baselines last. Stable: among equals the first to appear.
    columns = sorted(counts, key=lambda name: (name in BASELINES, -wins[name], -counts[name]))
    lines = [
        Line(printable(case.case.block, 60), label(case), href(case), tuple(cells.get(name) for name in columns))
        for case, cells in zip(run.cases, found, strict=True)
    ]
    return Matrix(tuple(printable(name, 40) for name in columns), tuple(lines), run.timed)


def label(case: CaseOf) -> str:
    """The case without its block: "llama-8b bf16 train"."""
    it = case.case
    precision = "" if it.precision == "ieee" else f" {it.precision}"
    return printable(f"{it.name} {DTYPES[it.dtype].short}{precision} {it.direction}", 120)


def href(case: CaseOf) -> str:
    return "#/case/" + "/".join(quote(piece, safe="", errors="replace") for piece in case.case.id.split("/"))


def level_of(ratio: float) -> int:
    return sum(ratio > bound for bound in BOUNDS)


def _cell(case: CaseOf, member: Member, timed: bool) -> Cell:
    if member.time_us is None:
        return _untimed(case, member, timed)
    best = case.best(member)
    assert best is not None
    time = formats.microseconds(member.time_us)
    rounds = marks(member.row)
    small = " ".join(filter(None, (number(member.time_us), rounds)))
    alone = len(case.rivals(member)) == 1
    if best is member:
        words = f"{member.name}: {time}, " + ("nothing to hold it against" if alone else "the smallest median")
        return Cell("1.00" if not alone else "", small, None if alone else 0, not alone, title=printable(words))
    ratio = member.time_us / (best.time_us or member.time_us)
    judged = case.judged[member.name]
    mark = mark_of(judged)
    words = f"{member.name}: {time}, {number(ratio)} times {best.name}'s; against it {judged.text if judged else '?'}"
    return Cell(number(ratio), small, level_of(ratio), mark=mark, title=printable(words))


def mark_of(judged: paired_rounds.Judgement | None) -> str:
    if judged is None:
        return "unresolved"
    return {DEPENDS: "flip", "tie": "tie", "unresolved": "unresolved"}.get(judged.word, "")


def _untimed(case: CaseOf, member: Member, timed: bool) -> Cell:
    row = member.row
    status = printable(str(row["status"]), 20)
    words = printable(f"{member.name}: {status}{': ' if row['detail'] else ''}{row['detail'] or ''}")
    if timed or not counts(row):
        return Cell(outcome(row), status=status, title=words)
    moved, kernels = row["bytes_moved"], formats.count(row["kernels"], "kernel")
    least = min((m.row["bytes_moved"] for m in case.members if counts(m.row) and m.row["bytes_moved"]), default=None)
    if not moved or not least:
        return Cell("?", kernels, status=status, title=words)
    ratio = moved / least
    words = f"{member.name}: {kernels}, which declare {formats.size(moved)}, {number(ratio)} times the fewest here"
    return Cell(number(ratio), kernels, level_of(ratio), best=moved == least, title=printable(words), status=status)
