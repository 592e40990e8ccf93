"""What passes through memory between kernels, and from forward to backward."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from .. import formats
from ..model import PHASES, Buffer, Phase
from ..operations import is_product
from .finding import Finding, FindingKind
from .phrases import count, series
from .view import View


def kept_on_chip(views: Sequence[View]) -> Iterator[Finding]:
    """Arrays that pass between several kernels of one graph, all of whose stages lie in one kernel of another."""
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
        if not view.worth(size):
            continue
        touching = sorted({i for b in between for i in (*view.graph.producers[b.name], *view.graph.consumers[b.name])})
        what = view.described(between[0]) + (f" and {count(len(between) - 1)} more" if len(between) > 1 else "")
        who = series([keeper.name for keeper in views if keeper.key in keepers])
        text = (
            f"{view.name} moves {formats.size(size)} between {count(len(touching))} kernels of {view.place(touching)} "
            f"({what}), which {who} {'keeps' if len(keepers) == 1 else 'keep'} on chip in one kernel."
        )
        about = frozenset((view.key, buffer.name) for buffer in between)
        yield Finding("kept on chip", text, (view.key, *keepers), size, None, {view.key: tuple(touching)}, about)


def _held_by_one(view: View, other: View) -> Iterator[tuple[int, ...]]:
    """Kernels of `view` all of whose stages one kernel of `other` holds, and no other kernel there."""
    own, holders = view.holders, other.holders
    for index, kernel in enumerate(other.kernels):
        whole = {stage for stage in other.stages[index] if holders[stage] == [index]}
        multiplies = is_product(kernel) or kernel.kind in ("attention", "library", "custom")
        inside = tuple(
            i for i in sorted({i for stage in whole for i in own.get(stage, ())})
            if view.stages[i] <= whole and (multiplies or not is_product(view.kernels[i]))
        )
        if len(inside) > 1:
            yield inside


def _between(view: View, indices: Sequence[int]) -> list[Buffer]:
    """Intermediates that only these kernels touch, largest first."""
    inside = set(indices)
    producers, consumers = view.graph.producers, view.graph.consumers
    return [
        buffer for buffer in view.graph.materialized
        if buffer.role == "intermediate" and consumers.get(buffer.name)
        and inside.issuperset(producers[buffer.name]) and inside.issuperset(consumers[buffer.name])
    ]


def largest(view: View) -> Iterator[Finding]:
    buffer = next((b for b in _passed_on(view) if b.role == "intermediate"), None)
    if buffer is None or not view.worth(size := view.traffic(buffer)):
        return
    readers = view.graph.consumers[buffer.name]
    read = view.place(readers)
    text = (
        f"The largest intermediate that {view.name} writes to memory is {view.described(buffer)}, read by {read}: "
        f"{formats.size(size)} of traffic."
    )
    kernels = {view.key: (*view.graph.producers[buffer.name], *readers)}
    yield Finding("largest", text, (view.key,), size, None, kernels, frozenset({(view.key, buffer.name)}))


def _passed_on(view: View) -> list[Buffer]:
    """What one kernel writes and another reads, largest first."""
    return [buffer for buffer in view.graph.materialized if view.graph.consumers.get(buffer.name)]


def saved(views: Sequence[View]) -> Iterator[Finding]:
    """What forward keeps for backward besides the block's own inputs and outputs."""
    training = [view for view in views if any(kernel.phase == "backward" for kernel in view.kernels)]
    yield from _compared("saved", "saves {} for backward", {view: view.graph.saved for view in training}, ("backward",))


def intermediates(views: Sequence[View]) -> Iterator[Finding]:
    """All that is written to memory only for another kernel to read, where graphs differ in it."""
    kept = {view: [buffer for buffer in _passed_on(view) if buffer.role == "intermediate"] for view in views}
    if len(views) > 1:
        yield from _compared("intermediates", "writes {} of intermediates to memory", kept)


def _compared(
    kind: FindingKind, verb: str, kept: Mapping[View, Sequence[Buffer]], readers: Sequence[Phase] = PHASES
) -> Iterator[Finding]:
    """The sizes of all graphs in one sentence, and what it costs the first more than the last to write them and to
    read them in these phases."""
    if not kept:
        return
    sizes = {view: sum(buffer.bytes for buffer in buffers) for view, buffers in kept.items()}
    first, *rest = sorted(sizes, key=lambda view: -sizes[view])
    traffic = sum(first.traffic(buffer, readers) for buffer in kept[first])
    if rest:
        traffic -= sum(rest[-1].traffic(buffer, readers) for buffer in kept[rest[-1]])
    if (not rest or sizes[first] > sizes[rest[-1]]) and first.worth(traffic):
        others = "".join(f", {view.name} {formats.size(sizes[view])}" for view in rest)
        cost = f"{formats.size(traffic)} " + (f"more traffic than {rest[-1].name}'s" if rest else "of traffic")
        text = f"{first.name} {verb.format(formats.size(sizes[first]))}{others}: {cost}."
        yield Finding(kind, text, tuple(view.key for view in (first, *rest)), traffic)
