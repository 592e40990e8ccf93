"""The fusion graph that the fixture gives to a test, for all autotune choices."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..graph import formats
from ..graph.model import FusionGraph
from ..graph.render import text_view
from ..sources.explained import Explained
from .autotune_choices import AutotuneChoices
from .per_choice import for_each_choice
from .snapshot import merge_equal
from .view import View

__tracebackhide__ = True  # pytest: a failing test ends at its own line
WIDTH = 100


class Fusion:
    """The fusion graph of one call, with all attributes of `compare.pytest_plugin.view.View` (kernels, materialized,
    stage, fused, bytes_moved, ...). Where a product was not autotuned, each value stands for all autotune choices
    (`xlafuse.compare.pytest_plugin.per_choice`).

    choices: the graph of each autotune choice; a single one, called "", where nothing was left to choose. forward,
    backward: the phases that `grad=True` makes. notes: assumptions of the compile.
    """

    def __init__(self, choices: AutotuneChoices, match: Callable[[Fusion, str | None], bool]) -> None:
        self.name, self.notes = choices.name, choices.notes
        self.choices: Mapping[str, View] = {choice: View(graph) for choice, graph in choices.graphs.items()}
        self._match = match

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return for_each_choice(lambda choice: getattr(self.choices[choice], name), self.choices)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *(name for name in dir(View) if not name.startswith("_"))})

    def stage(self, name: str) -> Any:
        """`View.stage`. Raises UnknownName."""
        return for_each_choice(lambda choice: self.choices[choice].stage(name), self.choices)

    def fused(self, *stages: str) -> Any:
        """`View.fused`. Raises UnknownName."""
        return for_each_choice(lambda choice: self.choices[choice].fused(*stages), self.choices)

    @property
    def forward(self) -> Any:
        return for_each_choice(lambda choice: View(self.choices[choice].graph, "forward"), self.choices)

    @property
    def backward(self) -> Any:
        return for_each_choice(lambda choice: View(self.choices[choice].graph, "backward"), self.choices)

    def matches_snapshot(self, name: str | None = None) -> bool:
        """Return True where the graph equals the committed snapshot. Raises AssertionError with the difference.

        name: tells several snapshots of one test apart; one of them needs none. With snapshots of other versions only,
        it warns and returns True.
        """
        return self._match(self, name)

    def __repr__(self) -> str:
        return f"<fusion graph of {formats.name(self.name, 40)}>"

    def report(self) -> list[tuple[str, str]]:
        """Return (title, text) of each different graph, with its missed fusions."""
        found = []
        for choices, graph in merge_equal({choice: view.graph for choice, view in self.choices.items()}):
            title = f"fusion graph of {formats.name(self.name)}" + (f", products by {choices}" if choices else "")
            found.append((title, f"{Explained({self.name: graph}, self.notes).text(WIDTH)}\n\n{_why(graph)}"))
        return found


def _why(graph: FusionGraph) -> str:
    from ..graph.render import missed_view
    from ..sources.target_ceilings import own_ceilings

    return "missed fusions\n" + text_view.render(missed_view.tree(graph, *own_ceilings(graph)), WIDTH)
