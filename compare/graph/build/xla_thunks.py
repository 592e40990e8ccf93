"""Launches that XLA's runtime makes of an instruction: one of its kernel, or the steps of a sort.

A sort is one HLO instruction. It becomes a copy of its operands and several kernels.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ..join.launches import agreed
from ..model import FusionGraph, Kernel

if TYPE_CHECKING:
    from xlafuse.dumps.thunks import Thunk

UNKNOWN = "unknown"


def with_thunks(graph: FusionGraph, thunks: Mapping[str, Sequence[Thunk]]) -> FusionGraph:
    """Return the graph with what a dump says of its launches. thunks: `xlafuse.dumps.thunks.read`."""
    sites = Counter(kernel.name for kernel in graph.kernels or ())

    def told(kernel: Kernel) -> Kernel:
        found = thunks.get(kernel.name, ())
        own = [thunk for thunk in found if thunk.kernel is not None]
        first = [thunk for thunk in own if thunk.kernel == own[0].kernel]  # later ones are a sort's further steps
        if first:
            stated = agreed({
                name: [getattr(thunk, name) for thunk in first] for name in ("grid", "block", "shared_bytes")
            })
            kernel = replace(kernel, launch=replace(stated, config=kernel.launch.config))
        if kernel.facts.get("sort_launches") != UNKNOWN or not found or sites[kernel.name] > 1:
            return kernel
        once = len(found) == 1 and kernel.least_launches == 1
        return replace(
            kernel, launches=1 if once else None, least_launches=0 if once else kernel.least_launches,
            facts={**kernel.facts, "sort_launches": dict(Counter(thunk.kind for thunk in found))},
        )

    return graph if graph.kernels is None else replace(graph, kernels=tuple(map(told, graph.kernels)))
