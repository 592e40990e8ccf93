"""The bandwidth that prices a graph's missed fusions, for `--why` of `inspect` and `explain`."""

from __future__ import annotations

from .. import targets
from ..graph.analyse.roofline import Ceilings
from ..graph.model import FusionGraph
from ..sources.target_ceilings import own_ceilings, target_ceilings


def price(graph: FusionGraph, ceilings: Ceilings | None = None, whose: str = "") -> tuple[float, str]:
    """Return a copy's bandwidth in bytes a second, and the name of its GPU.

    Taken from the ceilings if given, else from the graph's own GPU, else from the default target.
    """
    if ceilings is None:
        ceilings, whose = own_ceilings(graph)
    if ceilings is None:
        ceilings, whose = target_ceilings(targets.DEFAULT), targets.DEFAULT
    return ceilings.bandwidth(1, 1), whose
