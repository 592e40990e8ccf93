"""`--why` of `inspect` and of `explain`: a graph's missed fusions, and whose bandwidth prices them."""

from __future__ import annotations

from collections.abc import Iterable

from .. import targets
from ..graph.analyse.roofline import Ceilings
from ..graph.model import FusionGraph
from ..graph.render import missed_view
from ..sources.target_ceilings import own_ceilings, target_ceilings
from .terminal import echo_json, emit


def price(graph: FusionGraph, ceilings: Ceilings | None = None, whose: str = "") -> tuple[float, str]:
    """The bandwidth of a copy (bytes a second), and whose it is: by these ceilings, else by those of the graph's own
    GPU, else by the default target's, as some GPU must price bytes, and what shows them says which."""
    if ceilings is None:
        ceilings, whose = own_ceilings(graph)
    if ceilings is None:
        ceilings, whose = target_ceilings(targets.DEFAULT), targets.DEFAULT
    return ceilings.bandwidth(1, 1), whose


def show(graphs: Iterable[tuple[FusionGraph, Ceilings | None, str]], *, as_json: bool, every: bool = False) -> None:
    """Print each graph's, by its ceilings and whose they are (`price`); as JSON a list of all."""
    answers = []
    for graph, ceilings, known in graphs:
        bandwidth, whose = price(graph, ceilings, known)
        if as_json:
            answers.append(missed_view.to_json(graph, bandwidth, whose))
        else:
            emit(missed_view.tree(graph, bandwidth, whose, every=every))
    if as_json:
        echo_json(answers)
