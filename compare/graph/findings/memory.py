"""Findings about arrays that pass through memory: between kernels, also unfused ones, and from forward to backward."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from .. import formats
from ..analyse.missed_fusions import folded, ranked
from ..analyse.products import passed_on
from ..analyse.roofline import Ceilings
from ..model import PHASES, REASONS, Buffer, Phase, Reason
from ..operations import is_product, may_multiply
from .finding import Finding, FindingKind
from .view import View, count, how_often, verb


def kept_on_chip(views: Sequence[View]) -> Iterator[Finding]:
    """Yield the arrays that several kernels pass on, where one kernel of another graph holds all their stages."""
    groups: dict[tuple[int, tuple[int, ...]], dict[str, None]] = defaultdict(dict)
    for number, view in enumerate(views):
        for other in views:
            if other is not view:
                for inside in _held_by_one(view, other):
                    groups[number, inside][other.key] = None
    for (number, inside), keepers in groups.items():
        view = views[number]
        between = _between(view, inside)
        size = sum(view.traffic(buffer) for buffer in between)
        if not view.is_significant(size):
            continue
        touching = sorted({i for b in between for i in (*view.graph.producers[b.name], *view.graph.consumers[b.name])})
        what = view.described(between[0]) + (f" and {count(len(between) - 1)} more" if len(between) > 1 else "")
        keeping = verb([keeper.name for keeper in views if keeper.key in keepers], "keep")
        text = (
            f"{view.name} moves {formats.size(size)} between {count(len(touching))} kernels of {view.place(touching)} "
            f"({what}). {keeping} {'it' if len(between) == 1 else 'them'} on chip in one kernel."
        )
        buffers = frozenset((view.key, buffer.name) for buffer in between)
        yield Finding("kept on chip", text, (view.key, *keepers), size, None, {view.key: tuple(touching)}, buffers)


def _held_by_one(view: View, other: View) -> Iterator[tuple[int, ...]]:
    """Yield groups of kernels of `view` whose stages all lie in one kernel of `other`, and in no other kernel there."""
    own, holders = view.holders, other.holders
    for index, kernel in enumerate(other.kernels):
        whole = {stage for stage in other.stages[index] if holders[stage] == [index]}
        inside = tuple(
            i for i in sorted({i for stage in whole for i in own.get(stage, ())})
            if view.stages[i] <= whole and (may_multiply(kernel) or not is_product(view.kernels[i]))
        )
        if len(inside) > 1:
            yield inside


def _between(view: View, indices: Sequence[int]) -> list[Buffer]:
    """Return the intermediates that only these kernels touch, largest first."""
    inside = set(indices)
    producers, consumers = view.graph.producers, view.graph.consumers
    return [
        buffer for buffer in view.graph.materialized
        if buffer.role == "intermediate" and consumers.get(buffer.name)
        and inside.issuperset(producers[buffer.name]) and inside.issuperset(consumers[buffer.name])
    ]


def largest(view: View) -> Iterator[Finding]:
    """Yield the largest intermediate that one kernel writes and another reads, without partial sums of products."""
    buffer = next((b for b in passed_on(view.graph) if b.role == "intermediate"), None)
    if buffer is None or not view.is_significant(size := view.traffic(buffer)):
        return
    readers = view.graph.consumers[buffer.name]
    described, reader = view.described(buffer), view.place(readers)
    if reader == view.maker(buffer):  # both ends are one line or stage, so their operations tell them apart
        writers = view.graph.producers[buffer.name]
        described = f"{formats.shape(buffer)}, {formats.size(buffer.bytes)}, written by {view.work(writers)}"
        reader = view.work(readers)
    text = (
        f"{view.name}'s largest intermediate is {described}, read by {reader}. "
        f"Writing and reading it moves {formats.size(size)}."
    )
    kernels = {view.key: (*view.graph.producers[buffer.name], *readers)}
    yield Finding("largest", text, (view.key,), size, None, kernels, frozenset({(view.key, buffer.name)}))


def missed(view: View, ceilings: Ceilings | None) -> Iterator[Finding]:
    """Yield the missed fusion with the largest saving, with those of the same work.

    The saving is predicted where nothing of the graph was measured, else it is that of most bytes.
    """
    named = view.graph.named
    found = ranked(view.graph, ceilings if view.predicted else None)
    priced = [one for one in found if one.reason.producer in named and one.reason.consumer in named]
    if not priced:
        return
    alike = folded(view.graph, priced)[0]
    best, size = alike.first.reason, alike.price.bytes
    if not view.is_significant(size):
        return
    indices = [named[name] for name in (best.producer, best.consumer)]
    ends = list(map(view.kernel_kind, indices))
    if ends[0] == ends[1]:  # one kind and one place, so only the operations tell the two apart
        ends = [f"the kernel of {view.work(end)}" for end in indices]
    times = f", {how_often(len(alike.fusions))}" if len(alike.fusions) > 1 else ""
    text = (
        f"{view.name} does not fuse {ends[0]} with {ends[1]}{times}: {_because(view, best)}. "
        f"Fusing them would save at most {formats.size(size)}."
    )
    reasons = [fusion.reason for fusion in alike.fusions]
    kernels = {view.key: tuple(i for r in reasons for name in (r.producer, r.consumer) for i in named[name])}
    # The buffer with most of the saving decides whether another finding has covered it.
    buffers = frozenset((view.key, name) for name in alike.price.buffers[:1])
    us = alike.price.us if alike.price.predicted else None
    yield Finding("missed", text, (view.key,), size, us, kernels, buffers, predicted=us is not None)


def _because(view: View, reason: Reason) -> str:
    if view.key == "xla-unfused":
        return "its fusion passes are off"
    words = reason.text if reason.code == "other" else REASONS[reason.code]
    return words.rstrip(".") or "it gives no reason"


def saved(views: Sequence[View]) -> Iterator[Finding]:
    """Yield the residuals that forward keeps for backward, besides the block's own inputs and outputs."""
    training = [view for view in views if any(kernel.phase == "backward" for kernel in view.kernels)]
    kept = {view: view.graph.saved for view in training}
    yield from _compared("saved", "keeps {} for the backward pass", kept, ("backward",))


def intermediates(views: Sequence[View]) -> Iterator[Finding]:
    """Yield the intermediates that kernels pass on through memory, where graphs differ in their size."""
    kept = {
        view: [b for b in view.graph.materialized if b.role == "intermediate" and view.graph.consumers.get(b.name)]
        for view in views
    }
    if len(views) > 1:
        yield from _compared("intermediates", "writes {} of intermediates to memory", kept)


def _compared(
    kind: FindingKind, words: str, kept: Mapping[View, Sequence[Buffer]], readers: Sequence[Phase] = PHASES
) -> Iterator[Finding]:
    """Yield one finding that compares the sizes of all graphs.

    Its traffic is the writes, and the reads in these phases, of the graph with the most bytes minus that of the graph
    with the fewest.
    """
    if not kept:
        return
    sizes = {view: sum(buffer.bytes for buffer in buffers) for view, buffers in kept.items()}
    first, *rest = sorted(sizes, key=lambda view: -sizes[view])
    traffic = sum(first.traffic(buffer, readers) for buffer in kept[first])
    if rest:
        traffic -= sum(rest[-1].traffic(buffer, readers) for buffer in kept[rest[-1]])
    if (not rest or sizes[first] > sizes[rest[-1]]) and first.is_significant(traffic):
        others = ", ".join(f"{view.name}: {formats.size(sizes[view])}" for view in rest)
        more = f" more than {rest[-1].name}'s" if rest else ""
        text = (
            f"{first.name} {words.format(formats.size(sizes[first]))}{f' ({others})' if rest else ''}. "
            f"Writing and reading them moves {formats.size(traffic)}{more}."
        )
        # Other findings name single intermediates; one of them may name the only one that there is.
        buffers = frozenset((first.key, buffer.name) for buffer in kept[first] if kind == "intermediates")
        yield Finding(kind, text, tuple(view.key for view in (first, *rest)), traffic, buffers=buffers)
