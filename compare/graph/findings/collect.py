"""What stands out in one or more fusion graphs of the same program, in words made from the graphs alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from ...base.text import printable
from ..analyse.align import common_depth
from ..analyse.roofline import Ceilings
from ..model import FusionGraph
from .above_roofline import above_roofline, more_flops
from .copies import copies
from .finding import Finding
from .memory import intermediates, kept_on_chip, largest, saved
from .missed import missed
from .products import inside_products
from .repeated import duplicates, recomputations
from .view import View

LONGEST = 1000  # characters of one sentence: names come from files of any origin


def findings(graphs: Mapping[str, FusionGraph], ceilings: Ceilings | None = None) -> list[Finding]:
    """What is slow, copies, computes twice or too much, fuses into products, keeps on chip, writes, saves and leaves
    unfused.

    graphs: by the name to speak of them by; well-known ones are spelt out ("xla" -> "XLA").
    First comes the kernel furthest above its floor, then the others by their traffic, one for each buffer, and FLOPs by
    the traffic that takes as long (last without ceilings). What concerns less than 1% of a graph's traffic is left out.
    """
    shorten = common_depth(list(graphs.values()))
    views = [View(name, graph, shorten) for name, graph in graphs.items() if graph.kernels]
    # Of two about one buffer the one that also says who does better comes first.
    found = [*inside_products(views), *kept_on_chip(views)]
    for view in views:
        found += [*copies(view), *duplicates(view), *largest(view), *missed(view)]
    found += [*recomputations(views), *saved(views), *intermediates(views)]
    found = _one_of_each_buffer(sorted(found, key=lambda one: -one.bytes))
    found += more_flops(views, ceilings)
    if ceilings is not None:
        bandwidth = ceilings.bandwidth(1, 1)
        found.sort(key=lambda one: -(one.bytes or (one.us or 0.0) * bandwidth / 1e6))
        found = [*above_roofline(views, ceilings), *found]
        found = [one if one.us is not None else replace(one, us=one.bytes / bandwidth * 1e6) for one in found]
    return [replace(one, text=printable(one.text, LONGEST)) for one in found]


def _one_of_each_buffer(found: Iterable[Finding]) -> list[Finding]:
    """Without those all of whose buffers an earlier one is about."""
    told: set[tuple[str, str]] = set()
    kept = []
    for one in found:
        if not one.buffers or not one.buffers <= told:
            kept.append(one)
        told |= one.buffers
    return kept
