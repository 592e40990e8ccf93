"""The changes between the graphs of two paths, paired by name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from ...base.text import printable
from ...base.usage import UsageError
from ...graph import formats
from ...graph.analyse.diff import diff as differences
from ...graph.render import diff_view, text_view
from ...sources.result import Result
from ...sources.source import Source
from ..aligned import unique
from ..outline import Outline

if TYPE_CHECKING:
    from rich.console import RenderableType

SCHEMA = "xlafuse.graph-diff/1"

Pair = tuple[str, Result | None, Result | None]


def compare(a: Source, b: Source) -> tuple[Outline, bool]:
    """Return what changed between the graphs, and whether anything did.

    Raises UsageError where no graph is on both sides.
    """
    answers = [
        _compare(*pair) for pair in match(a, b)
        if all(result is None or result.read is not None for result in pair[1:])
    ]
    if not answers:
        raise UsageError(f"{a.path} and {b.path}: no graph is recorded on both sides")
    changed = [view for data, view in answers if data["differs"]]

    def trees() -> Iterator[RenderableType]:
        yield from changed
        if same := len(answers) - len(changed):
            yield text_view.plain(f"no difference in {formats.count(same, 'graph')}")

    return Outline(lambda: {"schema": SCHEMA, "graphs": [data for data, _ in answers]}, trees), bool(changed)


def match(a: Source, b: Source) -> list[Pair]:
    """Pair the graphs of `a` and `b` by name (the second "jit_f" with the second), in the order of `a`.

    A single graph on each side makes a pair whatever the names. Graphs that only `b` has come last.
    """
    if (a.run is None) != (b.run is None):
        raise UsageError(f"{a.path} and {b.path}: a run can only be compared with another run")
    if len(a.results) == len(b.results) == 1:
        old, new = a.results[0], b.results[0]
        return [(f"{_label(old)} → {_label(new)}", old, new)]
    left, right = _by_name(a.results), _by_name(b.results)
    names = dict.fromkeys((*left, *right))
    return [(name, left.get(name), right.get(name)) for name in names]


def _label(result: Result) -> str:
    return str(result.path) if result.id == result.path.name else f"{result.path} {result.id}"


def _by_name(results: Iterable[Result]) -> dict[str, Result]:
    """Return the results by name. Several of one name are numbered in the order in which they were compiled."""
    ordered = sorted(results, key=lambda result: result.order)
    return dict(zip(unique(result.id for result in ordered), ordered, strict=True))


def _compare(name: str, a: Result | None, b: Result | None) -> tuple[dict[str, Any], RenderableType]:
    """Return the difference as JSON and as a view."""
    if a is None or b is None:
        side = a or b
        assert side is not None
        words = f"{name}: only in {side.path}"
        return {"name": name, "differs": True, "only_in": str(side.path)}, text_view.plain(printable(words), "bold")
    graphs = a.load(), b.load()
    try:
        change = differences(*graphs)
    except ValueError as problem:
        raise UsageError(str(problem)) from None
    data = {"name": name, "differs": not change.empty, "only_in": None, **diff_view.to_json(change, *graphs)}
    return data, diff_view.tree(name, change, *graphs)
