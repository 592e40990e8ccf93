"""All findings about one or more fusion graphs of the same program."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from ...base.text import printable
from .. import formats
from ..analyse.align import common_depth
from ..analyse.roofline import Ceilings
from ..analyse.traffic_time import traffic_us
from ..model import FusionGraph
from .finding import NEVER_LEADING, Finding
from .kernels import above_roofline, copies
from .memory import intermediates, kept_on_chip, largest, missed, saved
from .products import dense_ragged, inside_products, more_flops
from .repeated import duplicates, recomputations
from .view import View, count

LONGEST = 1000  # characters of one finding; names come from files of any origin


def findings(graphs: Mapping[str, FusionGraph], ceilings: Ceilings | None = None) -> list[Finding]:
    """Return what stands out in the graphs: slow kernels, copies, repeated or excessive work, traffic, missed fusions.

    graphs: by the name to use in sentences; well-known names are spelt out ("xla" -> "XLA").

    The kernel furthest above its roofline time comes first. The others are sorted by their traffic, one finding for
    each buffer; FLOPs and predicted times count as the traffic that takes as long (without ceilings they come last).
    Findings about implementations in NEVER_LEADING come after all others, and facts after these: a fusion that was made
    costs nothing.
    Less than 1% of a graph's traffic makes no finding.
    """
    shorten = common_depth(list(graphs.values()))
    views = [View(name, graph, shorten) for name, graph in graphs.items() if graph.kernels]
    # Only the first finding about a buffer stays, so findings that name a better implementation come first.
    found = list(kept_on_chip(views))
    for view in views:
        found += [*copies(view), *duplicates(view), *largest(view), *missed(view, ceilings)]
    found += [*recomputations(views), *saved(views), *intermediates(views)]
    found = _one_of_each_buffer(sorted(found, key=lambda one: -one.bytes))
    found = list(_said_once([*found, *sorted(inside_products(views), key=lambda one: -one.bytes)]))
    found += [*more_flops(views, ceilings), *(one for view in views for one in dense_ragged(view, ceilings))]
    if ceilings is not None:
        rate = ceilings.bandwidth(1, 1) / 1e6
        by_name = {view.key: view for view in views}
        found = [_priced(one, by_name[one.graphs[0]], ceilings) for one in found]
        found.sort(key=lambda one: -((one.us or 0.0) * rate if one.predicted or not one.bytes else one.bytes))
        found = [*above_roofline(views, ceilings), *found]
    found.sort(key=lambda one: (one.is_fact, one.graphs[0] in NEVER_LEADING))
    return [replace(one, text=printable(one.text, LONGEST)) for one in found]


def _priced(one: Finding, view: View, ceilings: Ceilings) -> Finding:
    """Return the finding with the time of its traffic: predicted where it is that of its buffers, else at bandwidth."""
    if one.us is not None or not one.bytes or one.is_fact:
        return one
    traffic: Counter[int] = Counter()
    for key, name in one.buffers:
        if key == view.key:
            traffic += view.traffic_by_kernel(view.graph.buffer[name])
    if traffic.total() == one.bytes:
        us, predicted = traffic_us(view.graph, traffic, ceilings)
        return replace(one, us=us, predicted=predicted)
    return replace(one, us=one.bytes / ceilings.bandwidth(1, 1) * 1e6, predicted=False)


def _one_of_each_buffer(found: Iterable[Finding]) -> list[Finding]:
    """Drop each finding whose buffers earlier findings have covered. A sum over all buffers covers none of them."""
    covered: set[tuple[str, str]] = set()
    kept = []
    for one in found:
        if not one.buffers or not one.buffers <= covered:
            kept.append(one)
        if one.kind != "intermediates":
            covered |= one.buffers
    return kept


def _said_once(found: Iterable[Finding]) -> Iterator[Finding]:
    """Join findings of one text, as those of equal layers are. The joined text says how many there are."""
    equal: dict[str, list[Finding]] = defaultdict(list)
    for one in found:
        equal[one.text].append(one)
    for text, several in equal.items():
        first, *rest = several
        if rest:
            size, times = sum(one.bytes for one in several), [one.us for one in several if one.us is not None]
            groups = [set(one.kernels.get(first.graphs[0], ())) for one in several]
            apart = sum(map(len, groups)) == len(set().union(*groups))  # else two of them count some reads twice
            first = replace(
                first, bytes=size, us=sum(times) if len(times) == len(several) else None,
                text=f"{text} There are {count(len(several))} such groups of kernels: "
                f"{'' if apart else 'at most '}{formats.size(size)} in all.",
                kernels={name: tuple(dict.fromkeys(i for one in several for i in one.kernels.get(name, ())))
                         for name in dict.fromkeys(name for one in several for name in one.kernels)},
                buffers=frozenset().union(*(one.buffers for one in several)),
            )
        yield first
