"""The front page's matrix: a row for each case, a column for each implementation, times relative to the row's best.

A run without a GPU shows declared bytes instead, relative to the row's fewest, with the times that such a GPU recorded.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from ....base.text import number, printable
from ....graph import formats
from ....graph.findings.finding import NEVER_LEADING
from ....plan import paired_rounds
from ....plan.speedup import DEPENDS
from ....sources.case_results import BASELINES, CaseResults
from ....sources.result import Result
from ....sources.row import ratio
from ....sources.source import Source
from ....spec.block import MAIN_IMPLEMENTATIONS
from ...columns import marks, unmeasured_time
from ...matrix import counts, outcome

# Bounds of the colour levels, by ratio to the best; ratios beyond the last bound have one more level.
BOUNDS = (1.02, 1.1, 1.3, 2.0, 4.0)
LEADING = [name for name in MAIN_IMPLEMENTATIONS if name not in NEVER_LEADING]


@dataclass(frozen=True)
class Cell:
    """A cell of the matrix.

    small: the text below the main text. level: how many of BOUNDS the ratio exceeds; None without a ratio. mark: "tie",
    "flip" or "unresolved" compared with the row's best, else "". title: the tooltip.
    """

    text: str
    small: str = ""
    level: int | None = None
    best: bool = False
    mark: str = ""
    title: str = ""
    status: str = ""


@dataclass(frozen=True)
class Line:
    """A row of the matrix: one case."""

    block: str
    label: str
    href: str
    cells: tuple[Cell | None, ...]


@dataclass(frozen=True)
class Matrix:
    """The matrix. unfused: the columns of implementations without fusion; the page folds them."""

    columns: tuple[str, ...]
    unfused: tuple[str, ...]
    lines: tuple[Line, ...]
    timed: bool


def graphs(source: Source) -> list[dict[str, Any]]:
    """Return the rows of the table of graphs, most bytes first; it replaces the matrix for a path without records."""
    rows = [
        {
            "name": printable(case.block, 100), "href": href(case.id), "result": result,
            "times": ratio(result.row.bytes_declared, result.row.bytes_compulsory),
        }
        for case in source.cases for result in case.results
    ]
    return sorted(rows, key=lambda row: -(row["result"].row.bytes_declared or 0))


def matrix(source: Source) -> Matrix:
    """Return the matrix of all cases and implementations."""
    found = [{result.name: _cell(case, result, source) for result in case.results} for case in source.cases]
    counts = Counter(name for cells in found for name in cells)
    wins = Counter(name for cells in found for name, cell in cells.items() if cell.best)
    # The main compilers and hand-written Triton come first, implementations without fusion last.
    columns = sorted(counts, key=lambda name: (name in BASELINES, name not in LEADING, -wins[name], -counts[name]))
    lines = [
        Line(printable(case.block, 60), case.label, href(case.id), tuple(cells.get(name) for name in columns))
        for case, cells in zip(source.cases, found, strict=True)
    ]
    names = tuple(printable(name, 40) for name in columns)
    return Matrix(names, tuple(name for name in names if name in BASELINES), tuple(lines), source.timed)


def href(case_id: str) -> str:
    """Return the address of a case within the page."""
    return "#/case/" + "/".join(quote(piece, safe="", errors="replace") for piece in case_id.split("/"))


def level_of(ratio: float) -> int:
    """Return the colour level of a ratio to the best."""
    return sum(ratio > bound for bound in BOUNDS)


def _cell(case: CaseResults, result: Result, source: Source) -> Cell:
    if result.time_us is None:
        return _untimed(case, result, source)
    best = case.best(result)
    assert best is not None
    time = formats.microseconds(result.time_us)
    rounds = marks(result.row)
    small = " ".join(filter(None, (number(result.time_us), rounds)))
    alone = len(case.comparable(result)) == 1
    if best is result:
        words = f"{result.name}: {time}, " + ("nothing to compare with" if alone else "fastest")
        return Cell("1.00" if not alone else "", small, None if alone else 0, not alone, title=printable(words))
    ratio = result.time_us / (best.time_us or result.time_us)
    judged = case.judged[result.name]
    mark = mark_of(judged)
    verdict = judged.text if judged else "unresolved"
    words = f"{result.name}: {time}, {number(ratio)} times {best.name}'s; compared with it: {verdict}"
    return Cell(number(ratio), small, level_of(ratio), mark=mark, title=printable(words))


def mark_of(judged: paired_rounds.Comparison | None) -> str:
    """Return the mark of a comparison with the best."""
    if judged is None:
        return "unresolved"
    return {DEPENDS: "flip", "tie": "tie", "unresolved": "unresolved"}.get(judged.word, "")


def _untimed(case: CaseResults, result: Result, source: Source) -> Cell:
    row = result.row
    status = printable(str(row.status), 20)
    words = printable(f"{result.name}: {status}{': ' if row.detail else ''}{row.detail or ''}")
    if source.timed or not counts(row):
        return Cell(outcome(row), status=status, title=words)
    declared, kernels = row.bytes_declared, formats.count(row.kernels or 0, "kernel")
    fewest = min(filter(None, (r.row.bytes_declared for r in case.results if counts(r.row))), default=None)
    small, time = kernels, row.recorded_time_us
    recorded = "" if time is None else f"; {formats.microseconds(time)} recorded on an {source.recorded_on}"
    if known := unmeasured_time(row):
        small += f" · {known} µs"
    if time is None and row.predicted is not None:
        recorded = f"; {formats.predicted(row.predicted)}"
    if not declared or not fewest:
        return Cell("?", small, status=status, title=f"{words}{recorded}")
    ratio = declared / fewest
    words = f"{result.name}: {kernels}, {formats.size(declared)} declared, {number(ratio)} times the fewest in the row"
    title = printable(f"{words}{recorded}")
    return Cell(number(ratio), small, level_of(ratio), best=declared == fewest, title=title, status=status)
