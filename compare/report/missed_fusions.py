"""The ceilings, if any are known, that price a graph's missed fusions, for `--why` of `inspect` and `explain`."""

from __future__ import annotations

from ..graph.analyse.roofline import Ceilings
from ..graph.model import FusionGraph
from ..sources.target_ceilings import own_ceilings


def price(graph: FusionGraph, ceilings: Ceilings | None = None, whose: str = "") -> tuple[Ceilings | None, str]:
    """Return the ceilings and the name of their GPU.

    They are the given ones, else those of the graph's own GPU. None and "" where that GPU is unknown.
    """
    return own_ceilings(graph) if ceilings is None else (ceilings, whose)
