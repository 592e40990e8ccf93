"""All findings about one or more fusion graphs of the same program."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from ...base.text import printable
from ..analyse.align import common_depth
from ..analyse.roofline import Ceilings
from ..model import FusionGraph
from .above_roofline import above_roofline, dense_ragged, more_flops
from .copies import copies
from .finding import Finding
from .memory import intermediates, kept_on_chip, largest, saved
from .missed import missed
from .products import inside_products
from .ranking import NEVER_LEADING
from .repeated import duplicates, recomputations
from .view import View

LONGEST = 1000  # characters of one finding; names come from files of any origin


def findings(graphs: Mapping[str, FusionGraph], ceilings: Ceilings | None = None) -> list[Finding]:
    """Return what stands out in the graphs: slow kernels, copies, repeated or excessive work, traffic, missed fusions.

    graphs: by the name to use in sentences; well-known names are spelt out ("xla" -> "XLA").

    The kernel furthest above its roofline time comes first. The others are sorted by their traffic, one finding for
    each buffer; FLOPs count as the traffic that takes as long (without ceilings they come last). Findings about
    implementations in NEVER_LEADING come after all others. Less than 1% of a graph's traffic makes no finding.
    """
    shorten = common_depth(list(graphs.values()))
    views = [View(name, graph, shorten) for name, graph in graphs.items() if graph.kernels]
    # Only the first finding about a buffer stays, so findings that name a better implementation come first.
    found = [*inside_products(views), *kept_on_chip(views)]
    for view in views:
        found += [*copies(view), *duplicates(view), *largest(view), *missed(view)]
    found += [*recomputations(views), *saved(views), *intermediates(views)]
    found = _one_of_each_buffer(sorted(found, key=lambda one: -one.bytes))
    found += [*more_flops(views, ceilings), *(one for view in views for one in dense_ragged(view, ceilings))]
    if ceilings is not None:
        rate = ceilings.bandwidth(1, 1) / 1e6
        found.sort(key=lambda one: -(one.bytes or (one.us or 0.0) * rate))
        found = [*above_roofline(views, ceilings), *found]
        found = [one if one.us is not None or not one.bytes else replace(one, us=one.bytes / rate) for one in found]
    found.sort(key=lambda one: one.graphs[0] in NEVER_LEADING)
    return [replace(one, text=printable(one.text, LONGEST)) for one in found]


def _one_of_each_buffer(found: Iterable[Finding]) -> list[Finding]:
    """Drop each finding whose buffers earlier findings have covered."""
    covered: set[tuple[str, str]] = set()
    kept = []
    for one in found:
        if not one.buffers or not one.buffers <= covered:
            kept.append(one)
        covered |= one.buffers
    return kept
