"""Which graphs of one program multiply more than another of them needs.

A kernel's floor counts the FLOPs that it executes, so that of one which computes what nobody needs (a product of every
token with every expert, scores that a mask throws away) the floor is too high. Only another implementation shows that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..model import FusionGraph, Kernel
from ..operations import ANCHORS, is_product, token, tokens
from .roofline import Ceilings, product_dtype
from .totals import recomputed

_CLEARLY = 1.2  # times: what is less may be padding, or arithmetic that one counts with its products and another apart
_ALIKE = 1.05  # times the least: computes as little
_SMALL = 0.05  # of a graph's products


@dataclass(frozen=True)
class Excess:
    """What graph `of` computes beyond graphs `least`, by their places; the first of these computes least.

    flops: of its products. again: those of them that it computes a second time, which is another story
    (totals.recomputed). needed: all FLOPs of the first of `least`. us: what the FLOPs beyond those two take at the rate
    of products, None without ceilings of their type. kernels: launch indices of its products, but for the small ones.
    """

    of: int
    least: tuple[int, ...]
    flops: float
    again: float
    needed: float
    us: float | None
    kernels: tuple[int, ...]


def excesses(graphs: Sequence[FusionGraph], ceilings: Ceilings | None = None) -> list[Excess]:
    """One at most of each graph. Held against others are a graph's products alone, as many as are known; and of the
    others everything, for what one computes as a product another may compute otherwise, and all that may hold a product
    must be known. Where both were measured, only a faster one shows that less is enough."""
    needed = [_all_flops(graph) for graph in graphs]
    times = [_time(graph) for graph in graphs]
    found = []
    for index, graph in enumerate(graphs):
        work = _products(graph)
        flops = sum(work.values())
        less = {
            other: known for other, known in enumerate(needed)
            if known and flops >= _CLEARLY * known and not _slower(times[other], times[index])
            and _phases(graph) == _phases(graphs[other])
        }
        again = _again(graph, work) if less else 0.0
        less = {other: known for other, known in less.items() if flops - again >= _CLEARLY * known}
        if less:
            known = min(less.values())
            least = sorted((other for other in less if less[other] <= _ALIKE * known), key=less.__getitem__)
            us = _at_rate(graph, max(work, key=work.__getitem__), flops - again - known, ceilings)
            kernels = tuple(i for i in work if work[i] >= _SMALL * flops)
            found.append(Excess(index, tuple(least), flops, again, known, us, kernels))
    return found


def _phases(graph: FusionGraph) -> set[str]:
    return {kernel.phase for kernel in graph.kernels or ()}


def _products(graph: FusionGraph) -> dict[int, float]:
    """FLOPs of one call by launch index, as far as they are known."""
    return {
        index: kernel.flops * kernel.launches for index, kernel in enumerate(graph.kernels or ())
        if _multiplies(kernel) and kernel.flops and kernel.launches
    }


def _all_flops(graph: FusionGraph) -> float | None:
    """None where it is not known what a kernel computes that may hold a product."""
    total = 0.0
    for kernel in graph.kernels or ():
        if kernel.flops is not None and kernel.launches is not None:
            total += kernel.flops * kernel.launches
        elif _multiplies(kernel) or kernel.kind in ("library", "custom"):
            return None
    return total


def _multiplies(kernel: Kernel) -> bool:
    return is_product(kernel) or kernel.kind == "attention" or "attention" in tokens(kernel)


def _again(graph: FusionGraph, work: Mapping[int, float]) -> float:
    """FLOPs of products that other kernels compute too, or that repeat forward's on purpose: of a kernel with several
    products each counts alike."""
    repeated = {
        (index, found.op.site, found.op.backward) for found in recomputed(graph) for index in found.kernels[1:]
    }
    total = 0.0
    for index, flops in work.items():
        products = [op for op in (graph.kernels or ())[index].source_ops if token(op.op) in ANCHORS]
        again = [op for op in products if op.rematerialized or (index, op.site, op.backward) in repeated]
        total += flops * len(again) / max(len(products), 1)
    return total


def _time(graph: FusionGraph) -> float | None:
    times = [kernel.device_time_us for kernel in graph.kernels or ()]
    known = [time for time in times if time is not None]
    return sum(known) if known and len(known) == len(times) else None


def _slower(time: float | None, than: float | None) -> bool:
    return time is not None and than is not None and time >= than


def _at_rate(graph: FusionGraph, index: int, flops: float, ceilings: Ceilings | None) -> float | None:
    if ceilings is None:
        return None
    rate = ceilings.rate(product_dtype(graph, (graph.kernels or ())[index]))
    return None if rate is None else flops / rate * 1e6
