"""The changes between the graphs of two paths, paired by name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ...base.text import escaped, printable
from ...base.usage import UsageError
from ...graph import formats
from ...graph.analyse.diff import GraphDiff
from ...graph.analyse.diff import diff as differences
from ...graph.analyse.totals import predicted_sum, totals
from ...graph.model import FusionGraph
from ...graph.render import diff_view, text_view
from ...sources.result import Result
from ...sources.source import Source
from ..aligned import unique
from ..outline import Outline

if TYPE_CHECKING:
    from rich.console import RenderableType

SCHEMA = "xlafuse.graph-diff/1"


@dataclass(frozen=True)
class Pair:
    """A graph before and after; None on a side that does not have it."""

    name: str
    before: Result | None
    after: Result | None

    @property
    def sides(self) -> list[Result]:
        return [result for result in (self.before, self.after) if result is not None]

    @cached_property
    def change(self) -> GraphDiff | None:
        """None where one side does not have the graph. Raises UsageError where two cannot be compared."""
        if self.before is None or self.after is None:
            return None
        try:
            return differences(self.before.load(), self.after.load())
        except ValueError as problem:
            raise UsageError(str(problem)) from None

    @property
    def differs(self) -> bool:
        return self.change is None or not self.change.empty

    @property
    def view(self) -> RenderableType:
        graphs = [side.load() for side in self.sides]
        if self.change is None:
            return text_view.plain(printable(f"{self.name}: only in {self.sides[0].path}"), "bold")
        return diff_view.tree(self.name, self.change, *graphs)

    def to_json(self) -> dict[str, Any]:
        numbers = {
            word: side and _numbers(_timed(side)) for word, side in (("before", self.before), ("after", self.after))
        }
        found = {"name": self.name, "differs": self.differs, **numbers}
        if self.change is None:
            return {**found, "only_in": str(self.sides[0].path)}
        return {**found, "only_in": None, **diff_view.to_json(self.change, *(side.load() for side in self.sides))}

    @property
    def line(self) -> list[str]:
        """The graph's name, its kernels, bytes and time before and after where they differ, and a word."""
        cells = zip(*(_cells(_timed(side)) for side in self.sides), strict=True)
        word = "new" if self.before is None else "gone" if self.after is None else "differs" * self.differs or "same"
        return [escaped(printable(self.name)), *(" → ".join(dict.fromkeys(cell)) for cell in cells), word]


def compare(a: Source, b: Source) -> tuple[Outline, bool]:
    """Return what changed between the graphs, and whether anything did.

    Raises UsageError where no graph is on both sides.
    """
    pairs = [pair for pair in match(a, b) if all(side.read is not None for side in pair.sides)]
    if not pairs:
        raise UsageError(f"{a.path} and {b.path}: no graph is recorded on both sides")
    changed = [pair for pair in pairs if pair.differs]

    def trees() -> Iterator[RenderableType]:
        yield from (pair.view for pair in changed)
        if same := len(pairs) - len(changed):
            yield text_view.plain(f"no difference in {formats.count(same, 'graph')}")

    def document() -> dict[str, Any]:
        return {"schema": SCHEMA, "graphs": [pair.to_json() for pair in pairs]}

    return Outline(document, trees, summary=lambda: _table(pairs)), bool(changed)


def match(a: Source, b: Source) -> list[Pair]:
    """Pair the graphs of `a` and `b` by name (the second "jit_f" with the second), in the order of `a`.

    A single graph on each side makes a pair whatever the names. Graphs that only `b` has come last.
    """
    if (a.run is None) != (b.run is None):
        raise UsageError(f"{a.path} and {b.path}: a run can only be compared with another run")
    if len(a.results) == len(b.results) == 1:
        old, new = a.results[0], b.results[0]
        name = old.id if old.id == new.id else f"{_label(old)} → {_label(new)}"
        return [Pair(name, old, new)]
    left, right = _by_name(a.results), _by_name(b.results)
    names = dict.fromkeys((*left, *right))
    return [Pair(name, left.get(name), right.get(name)) for name in names]


def _label(result: Result) -> str:
    return str(result.path) if result.id == result.path.name else f"{result.path} {result.id}"


def _by_name(results: Iterable[Result]) -> dict[str, Result]:
    """Return the results by name. Several of one name are numbered in the order in which they were compiled."""
    ordered = sorted(results, key=lambda result: result.order)
    return dict(zip(unique(result.id for result in ordered), ordered, strict=True))


def _timed(result: Result) -> FusionGraph:
    """Return the graph, with predicted times where none was measured."""
    return result.timed_graph or result.load()


def _numbers(graph: FusionGraph) -> dict[str, Any]:
    sums = totals(graph)
    return {
        "kernels": sums.kernels, "bytes_declared": sums.declared.exact,
        "device_time_us": sums.device_time_us and sums.device_time_us.exact,
        "predicted": None if graph.measured else asdict(predicted_sum(graph.kernels or ())),
    }


def _cells(graph: FusionGraph) -> tuple[str, str, str]:
    sums = totals(graph)
    time = sums.device_time_us.in_words(formats.microseconds) if sums.device_time_us else (
        text_view.predicted_words(graph) or formats.UNKNOWN
    )
    kernels = formats.UNKNOWN if sums.kernels is None else str(sums.kernels)
    return kernels, sums.declared.in_words(formats.size), time


def _table(pairs: Sequence[Pair]) -> str:
    from tabulate import tabulate

    headers = ["graph", "kernels", "declared bytes", "time", "fusion"]
    return tabulate([pair.line for pair in pairs], headers, tablefmt="github", disable_numparse=True)
