"""The bandwidth, if one is known, that prices a graph's missed fusions, for `--why` of `inspect` and `explain`."""

from __future__ import annotations

from ..graph.analyse.roofline import Ceilings
from ..graph.model import FusionGraph
from ..sources.target_ceilings import own_ceilings


def price(graph: FusionGraph, ceilings: Ceilings | None = None, whose: str = "") -> tuple[float | None, str]:
    """Return a copy's bandwidth in bytes a second, and the name of its GPU.

    Taken from the ceilings if given, else from the graph's own GPU. None and "" where that GPU is unknown.
    """
    if ceilings is None:
        ceilings, whose = own_ceilings(graph)
    return (None, "") if ceilings is None else (ceilings.bandwidth(1, 1), whose)
