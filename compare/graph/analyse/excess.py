"""Graphs whose products compute more FLOPs than another graph of the same program needs.

A kernel's roofline time counts all FLOPs that it executes. It is too long for a kernel that computes unneeded values:
a product of every token with every expert, or scores that a mask throws away. Only another implementation shows that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..model import FusionGraph, Kernel
from ..operations import ANCHORS, is_product, token, tokens
from .roofline import Ceilings, product_time_us
from .totals import repeated, tally

_CLEARLY = 1.2  # times; a smaller ratio may be padding, or arithmetic that only one compiler counts with its products
_EQUAL = 1.05  # times the fewest FLOPs
_SMALL = 0.05  # of a graph's products


@dataclass(frozen=True)
class Excess:
    """The FLOPs that one graph computes beyond others.

    graph, references: positions of the graph and of those that compute least; the first reference computes least.
    flops: of the graph's products.
    repeated: FLOPs that it computes a second time (`totals.recomputed` reports these).
    needed: all FLOPs of the first reference.
    us: the time of the FLOPs beyond those two at the rate of products; None without ceilings of their type.
    kernels: launch indices of its products, without the small ones.
    """

    graph: int
    references: tuple[int, ...]
    flops: float
    repeated: float
    needed: float
    us: float | None
    kernels: tuple[int, ...]


def excesses(graphs: Sequence[FusionGraph], ceilings: Ceilings | None = None) -> list[Excess]:
    """Return at most one excess for each graph.

    The graph counts its known products only. A reference counts everything, because it may compute a product otherwise,
    and all its kernels that may hold a product must have known FLOPs. Where both graphs were measured, only a faster
    reference shows that fewer FLOPs are enough.
    """
    needed = [_all_flops(graph) for graph in graphs]
    times = [_time(graph) for graph in graphs]
    found = []
    for index, graph in enumerate(graphs):
        work = _products(graph)
        flops = sum(work.values())
        fewer = {
            other: known for other, known in enumerate(needed)
            if known and flops >= _CLEARLY * known and not _slower(times[other], times[index])
            and _phases(graph) == _phases(graphs[other])
        }
        again = _repeated(graph, work) if fewer else 0.0
        fewer = {other: known for other, known in fewer.items() if flops - again >= _CLEARLY * known}
        if fewer:
            least = min(fewer.values())
            references = sorted((other for other in fewer if fewer[other] <= _EQUAL * least), key=fewer.__getitem__)
            heaviest = (graph.kernels or ())[max(work, key=work.__getitem__)]
            us = product_time_us(graph, heaviest, flops - again - least, ceilings)
            kernels = tuple(i for i in work if work[i] >= _SMALL * flops)
            found.append(Excess(index, tuple(references), flops, again, least, us, kernels))
    return found


def _phases(graph: FusionGraph) -> set[str]:
    return {kernel.phase for kernel in graph.kernels or ()}


def _products(graph: FusionGraph) -> dict[int, float]:
    """Return the known FLOPs of one call, by launch index."""
    return {
        index: kernel.flops * kernel.launches for index, kernel in enumerate(graph.kernels or ())
        if _multiplies(kernel) and kernel.flops and kernel.launches
    }


def _all_flops(graph: FusionGraph) -> float | None:
    """Return all FLOPs; None where those of a kernel that may hold a product are unknown."""
    total = 0.0
    for kernel in graph.kernels or ():
        if kernel.flops is not None and kernel.launches is not None:
            total += kernel.flops * kernel.launches
        elif _multiplies(kernel) or kernel.kind in ("library", "custom"):
            return None
    return total


def _multiplies(kernel: Kernel) -> bool:
    return is_product(kernel) or kernel.kind == "attention" or "attention" in tokens(kernel)


def _repeated(graph: FusionGraph, work: Mapping[int, float]) -> float:
    """Return the FLOPs of products that another kernel computes, too, or that repeat forward's on purpose.

    The products of one kernel share its FLOPs equally.
    """
    repeats, total = repeated(graph), 0.0
    for index, flops in work.items():
        products = [op for op in (graph.kernels or ())[index].source_ops if token(op.op) in ANCHORS]
        again = [op for op in products if op.rematerialized or (index, op.site, op.backward) in repeats]
        total += flops * len(again) / max(len(products), 1)
    return total


def _time(graph: FusionGraph) -> float | None:
    return tally(kernel.device_time_us for kernel in graph.kernels or ()).exact or None


def _slower(time: float | None, than: float | None) -> bool:
    return time is not None and than is not None and time >= than
