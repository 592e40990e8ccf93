"""What the fixture hands to a test: a function's fusion graph, in all the worlds that it may be compiled in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..graph import formats
from ..graph.model import FusionGraph
from ..graph.render import text_view
from ..sources.explained import Explained
from .autotune_choices import Worlds
from .per_choice import each
from .snapshot import alike
from .view import View

__tracebackhide__ = True  # pytest: a failing test ends at its own line
WIDTH = 100


class Fusion:
    """The fusion graph of one call. It has all that `compare.pytest_plugin.view.View` has (kernels, materialized,
    stage, fused, bytes_moved, ...); where a product was not autotuned, each in all worlds at once
    (`compare.pytest_plugin.per_choice`).

    worlds: the graph of each world by its name; a single one, called "", where nothing was left to choose. forward,
    backward: the parts that `grad=True` makes. notes: what must be known to read the graph rightly.
    """

    def __init__(self, worlds: Worlds, match: Callable[[Fusion, str | None], bool]) -> None:
        self.name, self.notes = worlds.name, worlds.notes
        self.worlds: Mapping[str, View] = {world: View(graph) for world, graph in worlds.graphs.items()}
        self._match = match

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return each(lambda world: getattr(self.worlds[world], name), self.worlds)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *(name for name in dir(View) if not name.startswith("_"))})

    def stage(self, name: str) -> Any:
        """`View.stage`. Raises UnknownName."""
        return each(lambda world: self.worlds[world].stage(name), self.worlds)

    def fused(self, *stages: str) -> Any:
        """`View.fused`. Raises UnknownName."""
        return each(lambda world: self.worlds[world].fused(*stages), self.worlds)

    @property
    def forward(self) -> Any:
        return each(lambda world: View(self.worlds[world].graph, "forward"), self.worlds)

    @property
    def backward(self) -> Any:
        return each(lambda world: View(self.worlds[world].graph, "backward"), self.worlds)

    def matches_snapshot(self, name: str | None = None) -> bool:
        """True where the graph is as in the committed snapshot; else AssertionError with the difference.

        name: tells the snapshots of one test apart; one of them needs none. Where there is a snapshot of other versions
        alone, warns and returns True.
        """
        return self._match(self, name)

    def __repr__(self) -> str:
        return f"<fusion graph of {formats.name(self.name, 40)}>"

    def report(self) -> list[tuple[str, str]]:
        """(title, text): the graph, and why it has not fewer kernels; of worlds with the same kernels, one."""
        found = []
        for worlds, graph in alike({world: view.graph for world, view in self.worlds.items()}):
            title = f"fusion graph of {formats.name(self.name)}" + (f", products by {worlds}" if worlds else "")
            found.append((title, f"{Explained({self.name: graph}, self.notes).text(WIDTH)}\n\n{_why(graph)}"))
        return found


def _why(graph: FusionGraph) -> str:
    from ..graph.render import missed_view
    from ..report.missed_fusions import price

    return "why it has not fewer kernels\n" + text_view.render(missed_view.tree(graph, *price(graph)), WIDTH)
