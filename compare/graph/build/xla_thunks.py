"""The launches of XLA's sorts: one HLO instruction becomes a copy of its operands and several kernels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from ..model import FusionGraph, Kernel

UNKNOWN = "unknown"


def with_thunks(graph: FusionGraph, thunks: Mapping[str, Mapping[str, int]]) -> FusionGraph:
    """Return the graph with what a dump says of its sorts. thunks: `xlafuse.dumps.thunks.by_instruction`."""
    sites = Counter(kernel.name for kernel in graph.kernels or ())

    def told(kernel: Kernel) -> Kernel:
        found = thunks.get(kernel.name)
        if kernel.facts.get("sort_launches") != UNKNOWN or not found or sites[kernel.name] > 1:
            return kernel
        once = sum(found.values()) == 1 and kernel.least_launches == 1
        return replace(
            kernel, launches=1 if once else None, least_launches=0 if once else kernel.least_launches,
            facts={**kernel.facts, "sort_launches": dict(found)},
        )

    return graph if graph.kernels is None else replace(graph, kernels=tuple(map(told, graph.kernels)))
