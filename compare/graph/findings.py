"""What stands out in one or more fusion graphs of the same program, in words made from the graphs alone."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from compare.graph import formats
from compare.graph.align import common_depth, part_of
from compare.graph.causes import cause
from compare.graph.excess import excesses
from compare.graph.model import REASONS, Buffer, FusionGraph, Part, Reason, SourceOp
from compare.graph.operations import ANCHORS, MOVEMENT, REDUCTIONS, is_product, token, tokens
from compare.graph.roofline import Ceilings, floor_us
from compare.graph.totals import Recomputed, bytes_moved, recomputed
from compare.report import printable, table

Sort = Literal[
    "above its floor", "copy", "duplicate", "recomputed", "inside a product", "kept on chip", "largest", "missed",
    "saved", "intermediates", "more FLOPs",
]


@dataclass(frozen=True)
class Finding:
    """One sentence. graphs: those it speaks of.

    bytes: the traffic that it is about. us: what these bytes take; measured where the finding is about whole kernels
    that were, else bytes over bandwidth, and None without ceilings; of "above its floor" the time above it, of "more
    FLOPs", which is about no traffic, what those take at the rate of products. kernels: launch indices by graph. about:
    buffers whose traffic it is, each with its graph's name.
    """

    sort: Sort
    text: str
    graphs: tuple[str, ...]
    bytes: int
    us: float | None = None
    kernels: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    about: frozenset[tuple[str, str]] = frozenset()

    def __str__(self) -> str:
        return self.text if self.us is None else f"{self.text} ({formats.microseconds(self.us)})"


def findings(
    graphs: Mapping[str, FusionGraph], ceilings: Ceilings | None = None, precision: str | None = None
) -> list[Finding]:
    """What is slow, copies, computes twice or too much, fuses into products, keeps on chip, writes, saves and leaves
    unfused.

    graphs: by the name to speak of them by; well-known ones are spelt out ("xla" -> "XLA"). precision: as in `totals`.
    First comes the kernel furthest above its floor, then the others by their traffic, one for each buffer, and FLOPs by
    the traffic that takes as long (last without ceilings). What concerns less than 1% of a graph's traffic is left out.
    """
    shorten = common_depth(list(graphs.values()))
    views = [_View(name, graph, shorten) for name, graph in graphs.items() if graph.kernels]
    # Of two about one buffer the one that also says who does better comes first.
    found = [*_inside_products(views), *_kept_on_chip(views)]
    for view in views:
        found += [*_copies(view), *_duplicates(view), *_largest(view), *_missed(view)]
    found += [*_recomputations(views), *_saved(views), *_intermediates(views)]
    found = _one_of_each_buffer(sorted(found, key=lambda one: -one.bytes))
    found += _more_flops(views, ceilings, precision)
    if ceilings is not None:
        bandwidth = ceilings.bandwidth(1, 1)
        found.sort(key=lambda one: -(one.bytes or (one.us or 0.0) * bandwidth / 1e6))
        found = [*_above_floor(views, ceilings, precision), *found]
        found = [one if one.us is not None else replace(one, us=one.bytes / bandwidth * 1e6) for one in found]
    return [replace(one, text=printable(one.text, LONGEST)) for one in found]


def _one_of_each_buffer(found: Iterable[Finding]) -> list[Finding]:
    """Without those all of whose buffers an earlier one is about."""
    told: set[tuple[str, str]] = set()
    kept = []
    for one in found:
        if not one.about or not one.about <= told:
            kept.append(one)
        told |= one.about
    return kept


SPELLINGS = {"xla": "XLA", "inductor": "Inductor", "triton": "Triton", "cuda": "CUDA", "eager": "Eager PyTorch"}
_WORTH = 0.01
LONGEST = 1000  # characters of one sentence: names come from files of any origin


class _View:
    """A graph with the words in which findings speak of it."""

    def __init__(self, name: str, graph: FusionGraph, shorten: Callable[[str], str]) -> None:
        self.key = name
        self.name = SPELLINGS.get(name, formats.name(name))
        self.graph = graph
        self.kernels = graph.kernels or ()
        self._shorten = shorten
        self._traffic = sum(bytes_moved(kernel) or 0 for kernel in self.kernels)

    def worth(self, size: float) -> bool:
        return size > 0 and size >= _WORTH * self._traffic

    def stage(self, op: SourceOp) -> str:
        return self._shorten(op.stage) if op.stage else ""

    @cached_property
    def stages(self) -> Sequence[set[tuple[Part, str]]]:
        """By kernel."""
        return [{(part_of(k, op), self.stage(op)) for op in k.source_ops if op.stage} for k in self.kernels]

    @cached_property
    def recomputed(self) -> Sequence[Recomputed]:
        return recomputed(self.graph)

    @cached_property
    def holders(self) -> Mapping[tuple[Part, str], list[int]]:
        """Kernels by the stages in them."""
        found: dict[tuple[Part, str], list[int]] = defaultdict(list)
        for index, stages in enumerate(self.stages):
            for stage in stages:
                found[stage].append(index)
        return found

    def place(self, indices: Iterable[int]) -> str:
        """Where in the program kernels come from: stages, else lines, else the kernels' own names."""
        held = [self.kernels[index] for index in dict.fromkeys(indices)]
        stages = [self.stage(op) for kernel in held for op in kernel.source_ops if op.stage]
        lines = [formats.place(line) for kernel in held for line in kernel.lines]
        return _series(stages or lines or [formats.name(kernel.name) for kernel in held])

    def maker(self, buffer: Buffer) -> str:
        """Where in the program the buffer comes from; its kernel's name where that is not known."""
        found = cause(self.graph, buffer.name)
        stages = [self._shorten(stage) for stage in found.stages]
        writers = self.graph.producers[buffer.name]
        return _series(stages) or formats.place(found.line) or formats.name(self.kernels[writers[-1]].name)

    def moved(self, indices: Iterable[int]) -> int:
        return sum(bytes_moved(self.kernels[index]) or 0 for index in indices)

    def time(self, indices: Sequence[int]) -> float | None:
        """Measured, None unless all of them were."""
        times = [self.kernels[index].device_time_us for index in indices]
        known = [time for time in times if time is not None]
        return sum(known) if len(known) == len(times) else None

    def buffers(self, index: int, side: Literal["inputs", "outputs"]) -> list[Buffer]:
        accesses = self.kernels[index].inputs if side == "inputs" else self.kernels[index].outputs
        return [self.graph.buffer[access.buffer] for access in accesses or ()]


_SLOW = 0.1  # of a graph's time


def _above_floor(views: Sequence[_View], ceilings: Ceilings, precision: str | None) -> Iterator[Finding]:
    """The kernel that takes longest beyond what it must."""
    worst: tuple[float, _View, int, float, float] | None = None
    for view in views:
        whole = sum(kernel.device_time_us or 0.0 for kernel in view.kernels)
        for index, kernel in enumerate(view.kernels):
            floor, took = floor_us(view.graph, kernel, ceilings, precision), kernel.device_time_us
            if floor is None or took is None or took - floor < _SLOW * whole:
                continue
            if worst is None or took - floor > worst[0]:
                worst = took - floor, view, index, took, floor
    if worst is not None:
        above, view, index, took, floor = worst
        name, place = formats.name(view.kernels[index].name), view.place([index])
        text = (
            f"Furthest above its floor is {view.name}'s {name}{f' of {place}' if place != name else ''}: it takes "
            f"{formats.microseconds(took)}, and its bytes and FLOPs {formats.microseconds(floor)} at least."
        )
        yield Finding("above its floor", text, (view.key,), view.moved([index]), above, {view.key: (index,)})


# Of a graph's time. What attention counts of masked scores is less than its tiles compute, most so where they are few.
_TELLING = 0.05


def _more_flops(views: Sequence[_View], ceilings: Ceilings | None, precision: str | None) -> Iterator[Finding]:
    """What computes more than others of the graphs need; not what has no time by these ceilings, or next to none."""
    for excess in excesses([view.graph for view in views], ceilings, precision):
        view, least = views[excess.of], [views[index] for index in excess.least]
        whole = view.time(range(len(view.kernels)))
        if ceilings is not None and (excess.us is None or excess.us < _TELLING * (whole or 0.0)):
            continue
        products = [op for i in excess.kernels for op in view.kernels[i].source_ops if token(op.op) in ANCHORS]
        place = _series([view.stage(op) or formats.place(op.line) for op in products]) or view.place(excess.kernels)
        again = f" ({formats.flops(excess.again)} of it again)" if excess.again else ""
        text = (
            f"{view.name} computes {formats.flops(excess.flops)} in the products of {place}{again}, "
            f"{table.number(excess.flops / excess.needed, 2)} times the {formats.flops(excess.needed)} that "
            f"{_series([other.name for other in least])} {'gets' if len(least) == 1 else 'get'} by with."
        )
        keys = tuple(other.key for other in (view, *least))
        yield Finding("more FLOPs", text, keys, 0, excess.us, {view.key: excess.kernels})


def _copies(view: _View) -> Iterator[Finding]:
    """Copy kernels, those of the same words together."""
    groups: dict[str, list[int]] = defaultdict(list)
    for index, kernel in enumerate(view.kernels):
        if kernel.kind == "copy":
            groups[_copying(view, index)].append(index)
    for words, indices in groups.items():
        size = view.moved(indices)
        if view.worth(size):
            who = "a copy kernel that moves" if len(indices) == 1 else f"{_count(len(indices))} copy kernels that move"
            text = f"{view.name} {words}: {who} {formats.size(size)}."
            yield Finding("copy", text, (view.key,), size, view.time(indices), {view.key: tuple(indices)})


def _copying(view: _View, index: int) -> str:
    read, written = view.buffers(index, "inputs"), view.buffers(index, "outputs")
    users = sorted({user for buffer in written for user in view.graph.consumers.get(buffer.name, ())})
    products = [user for user in users if is_product(view.kernels[user])]
    operands = [buffer for buffer in read if buffer.role != "constant"]
    arrays = Counter(_array(view, buffer) for buffer in operands)
    what = _series(
        array if times == 1 else array.replace("the result", f"{_count(times)} results")
        for array, times in arrays.items()
    )  # fmt: skip
    if not operands:
        verb = "fills an array"
    elif len(operands) == 2 and "gather" in tokens(view.kernels[index]):
        indices, table = sorted(operands, key=lambda buffer: buffer.dtype[0] not in "su")
        verb = f"looks up {_array(view, indices)} in {_array(view, table)}"
    elif len(operands) > 1:
        verb = f"joins {what} into one {'operand' if products else 'array'}"
    else:
        verb = f"{_moving(view, index, operands[0], written)} {what}"
    if products:
        return f"{verb} for the product in {view.place(products)}"
    if users:
        return f"{verb} for {view.place(users)}"
    roles = {buffer.role for buffer in written}
    purpose = {"output": " for an output", "saved": " for backward, which never reads it"}
    return verb + next((words for role, words in purpose.items() if role in roles), "")


def _moving(view: _View, index: int, read: Buffer, written: Sequence[Buffer]) -> str:
    """What becomes of one array in a kernel that computes nothing."""
    elements = sum(math.prod(buffer.shape) for buffer in written)
    names = tokens(view.kernels[index])
    if "pad" in names or (elements > math.prod(read.shape) and len(view.kernels[index].inputs or ()) > 1):
        return "pads"
    if elements >= 2 * math.prod(read.shape):
        return "broadcasts"
    converts = elements == math.prod(read.shape) and any(buffer.dtype != read.dtype for buffer in written)
    return "converts" if converts else "copies"


def _duplicates(view: _View) -> Iterator[Finding]:
    """Kernels launched again for the same values, those of the same words together."""
    groups: dict[tuple[str, str, int], list[list[int]]] = defaultdict(list)
    for group in _alike(view):
        groups[_operations(view, group[:1]), view.place(group), len(group)].append(group)
    for (ops, place, times), found in groups.items():
        extra = [index for group in found for index in group[1:]]
        size = view.moved(extra)
        if view.worth(size):
            text = (
                f"{view.name} launches {ops} in {place} {_times(times)}: the kernels read the same arrays and write "
                f"the same values, {formats.size(size)} more than one of them would move."
            )
            everything = tuple(index for group in found for index in group)
            yield Finding("duplicate", text, (view.key,), size, view.time(extra), {view.key: everything})


def _alike(view: _View) -> list[list[int]]:
    """Kernels that compute the same from the same: equal operations, equal inputs, outputs of equal shapes."""
    groups: dict[object, list[int]] = defaultdict(list)
    for index, kernel in enumerate(view.kernels):
        if not kernel.source_ops or not kernel.inputs or not all(op.site for op in kernel.source_ops):
            continue
        written = sorted((buffer.shape, buffer.dtype) for buffer in view.buffers(index, "outputs"))
        read = frozenset(access.buffer for access in kernel.inputs)
        groups[frozenset(op.site for op in kernel.source_ops), read, tuple(written)].append(index)
    return [group for group in groups.values() if len(group) > 1]


@dataclass
class _Again:
    """Operations that the same kernels compute."""

    kernels: tuple[int, ...]
    places: dict[str, None] = field(default_factory=dict)
    ops: dict[str, None] = field(default_factory=dict)


def _recomputations(views: Sequence[_View]) -> Iterator[Finding]:
    for view in views:
        parts: tuple[Part, ...] = ("forward", "backward")
        for part in parts:
            for again in _computed_again(view, part):
                holders = again.kernels
                size = _read_again(view, holders)
                if not view.worth(size):
                    continue
                where = f"{_count(len(holders))} {'backward ' if part == 'backward' else ''}kernels"
                others = _series([other for v in views if v is not view for other in _in_one(v, part, again.places)])
                text = (
                    f"{view.name} computes {_named(_series(again.places), again.ops)} in {where} which read "
                    f"{formats.size(size)} more than once{'; ' + others if others else ''}."
                )
                yield Finding("recomputed", text, (view.key,), size, None, {view.key: holders})
        for again in _on_purpose(view):
            size = _read_in_forward(view, again.kernels)
            if view.worth(size):
                text = (
                    f"{view.name} computes {_named(_series(again.places), again.ops)} again in backward, on purpose, "
                    f"to save less, and reads {formats.size(size)} a second time."
                )
                yield Finding("recomputed", text, (view.key,), size, None, {view.key: again.kernels})


def _computed_again(view: _View, part: Part) -> list[_Again]:
    alike = {index: number for number, group in enumerate(_alike(view)) for index in group}
    several = []
    for found in view.recomputed:
        kernels = tuple(sorted(i for i in found.kernels if part_of(view.kernels[i], found.op) == part))
        if len(kernels) > 1 and len({alike.get(i, -1 - i) for i in kernels}) > 1:
            several.append((found.op, kernels))
    return _grouped(view, several)


def _on_purpose(view: _View) -> list[_Again]:
    """What backward computes once more because checkpointing asked for it. Where several of its kernels do, fusion
    repeats it, not the program."""
    holders: dict[str, dict[int, SourceOp]] = defaultdict(dict)
    for index, kernel in enumerate(view.kernels):
        for op in kernel.source_ops:
            if kernel.part == "backward" and op.rematerialized:
                holders[op.site].setdefault(index, op)
    once = [held for held in holders.values() if len(held) == 1]
    return _grouped(view, [(op, (index,)) for held in once for index, op in held.items()])


def _read_in_forward(view: _View, indices: Iterable[int]) -> int:
    """Bytes that these kernels read of what forward's have read already."""
    read = {a.buffer for kernel in view.kernels if kernel.part == "forward" for a in kernel.inputs or ()}
    accesses = [(view.kernels[i].launches or 1, a) for i in indices for a in view.kernels[i].inputs or ()]
    return sum((access.bytes or 0) * launches for launches, access in accesses if access.buffer in read)


def _grouped(view: _View, several: Iterable[tuple[SourceOp, tuple[int, ...]]]) -> list[_Again]:
    """By the kernels that compute them; what only moves data is left out."""
    groups: dict[tuple[int, ...], _Again] = {}
    for op, kernels in several:
        if token(op.op) not in MOVEMENT:
            again = groups.setdefault(kernels, _Again(kernels))
            again.places[view.stage(op) or formats.place(op.line)] = None
            again.ops[token(op.op)] = None
    return list(groups.values())


def _in_one(view: _View, part: Part, places: Iterable[str]) -> Iterator[str]:
    """What to say of a graph where a single kernel does what several do elsewhere."""
    wanted = {(part, place) for place in places}
    holders = {i for stage in wanted for i in view.holders.get(stage, ()) if not is_product(view.kernels[i])}
    if len(holders) == 1 and wanted <= view.stages[min(holders)]:
        written = len(view.kernels[min(holders)].outputs or ())
        yield f"{view.name} does so in one kernel" + (f" with {_count(written)} outputs" if written > 1 else "")


def _read_again(view: _View, indices: Sequence[int]) -> int:
    """Bytes that these kernels read of buffers that one of them has read already."""
    sizes: dict[str, list[int]] = defaultdict(list)
    for index in indices:
        kernel = view.kernels[index]
        for access in kernel.inputs or ():
            sizes[access.buffer].append((access.bytes or 0) * (kernel.launches or 1))
    return sum(sum(reads) - max(reads) for reads in sizes.values())


@dataclass(frozen=True)
class _Extra:
    """Elementwise work in a product's kernel. bytes: traffic that a kernel of its own would add."""

    view: _View
    index: int
    stages: tuple[str, ...]
    bytes: int


def _inside_products(views: Sequence[_View]) -> Iterator[Finding]:
    groups: dict[tuple[Part, str, str, tuple[str, ...]], list[_Extra]] = defaultdict(list)
    for view in views:
        for index in range(len(view.kernels)):
            for of, spared, ops, extra in _around_product(view, index):
                groups[view.kernels[index].part, of, spared, ops].append(extra)
    for (part, of, spared, ops), held in groups.items():
        sizes: Counter[str] = Counter()
        for extra in held:
            sizes[extra.view.key] += extra.bytes
        owners = [view for view in views if view.worth(sizes[view.key])]
        if not owners:
            continue
        stages = dict.fromkeys(stage for extra in held for stage in extra.stages)
        size = max(sizes[view.key] for view in owners)
        kernels = {view.key: tuple(extra.index for extra in held if extra.view is view) for view in owners}
        many = max(map(len, kernels.values()))
        elsewhere = [view for view in views if view not in owners and _apart(view, part, set(stages))]
        others = _series([view.name for view in elsewhere])
        text = (
            f"{_series([view.name for view in owners])} {'computes' if len(owners) == 1 else 'compute'} "
            f"{_named(_series(stages), ops)} inside the product of {of}"
            f"{f', in {_count(many)} kernels' if many > 1 else ''}, which spares {spared}, "
            f"{formats.size(size)}{'; not so ' + others if others else ''}."
        )
        about = frozenset(pair for view in elsewhere for pair in _spared(view, part, set(stages)))
        yield Finding("inside a product", text, tuple(kernels), size, None, kernels, about)


def _around_product(view: _View, index: int) -> Iterator[tuple[str, str, tuple[str, ...], _Extra]]:
    """What a product's kernel does before the product and after it: (the product's stage, what that spares, operations,
    what they are)."""
    kernel = view.kernels[index]
    names = tokens(kernel)
    anchors = [position for position, name in enumerate(names) if name in ANCHORS]
    if not is_product(kernel) or not anchors:
        return
    products = [kernel.source_ops[position] for position in anchors]
    of = _series([view.stage(op) or formats.place(op.line) for op in products]) or formats.name(kernel.name)
    launches = kernel.launches or 1
    for before, span in ((True, range(anchors[0])), (False, range(anchors[-1] + 1, len(names)))):
        extra = [position for position in span if names[position] not in MOVEMENT | REDUCTIONS]
        if extra:
            stages = [view.stage(kernel.source_ops[position]) for position in extra]
            apart = tuple(stage for stage in dict.fromkeys(stages) if stage and stage not in of)
            written = sorted((buffer.bytes for buffer in view.buffers(index, "outputs")), reverse=True)
            many = len(anchors) if not _between_anchors(names, anchors) else 1
            results = "its result" if many == 1 else f"its {_count(many)} results"
            again = "it" if many == 1 else "them"
            if before:
                spared, size = "writing its operand and reading it again", 2 * _operand(view, index)
            elif len(written) == 1:
                spared, size = f"writing {results} and reading {again} again", 2 * written[0] * many
            else:  # the results themselves are written too, for backward
                spared, size = f"reading {results} again", sum(written[:many])
            ops = tuple(dict.fromkeys(names[position] for position in extra))
            yield of, spared, ops, _Extra(view, index, apart, size * launches)


def _between_anchors(names: Sequence[str], anchors: Sequence[int]) -> bool:
    """Whether work lies between a kernel's products: what the first makes is then not left for the epilogue."""
    return any(name not in MOVEMENT | ANCHORS for name in names[anchors[0] : anchors[-1]])


def _operand(view: _View, index: int) -> int:
    """Bytes of the smallest matrix that the kernel reads: no more than that is what a prologue makes an operand of."""
    read = view.buffers(index, "inputs")
    matrices = [buffer.bytes for buffer in read if len(buffer.shape) > 1] or [buffer.bytes for buffer in read]
    return min(matrices, default=0)


def _apart(view: _View, part: Part, stages: set[str]) -> bool:
    return any(not is_product(view.kernels[i]) for stage in stages for i in view.holders.get((part, stage), ()))


def _spared(view: _View, part: Part, stages: set[str]) -> Iterator[tuple[str, str]]:
    """Results of products that kernels of these stages read."""
    users = {i for stage in stages for i in view.holders.get((part, stage), ()) if not is_product(view.kernels[i])}
    for index in users:
        for buffer in view.buffers(index, "inputs"):
            if any(is_product(view.kernels[i]) for i in view.graph.producers.get(buffer.name, ())):
                yield view.key, buffer.name


def _kept_on_chip(views: Sequence[_View]) -> Iterator[Finding]:
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
        size = sum(_traffic(view, buffer) for buffer in between)
        if not view.worth(size):
            continue
        touching = sorted({i for b in between for i in (*view.graph.producers[b.name], *view.graph.consumers[b.name])})
        what = _described(view, between[0]) + (f" and {_count(len(between) - 1)} more" if len(between) > 1 else "")
        who = _series([keeper.name for keeper in views if keeper.key in keepers])
        text = (
            f"{view.name} moves {formats.size(size)} between {_count(len(touching))} kernels of {view.place(touching)} "
            f"({what}), which {who} {'keeps' if len(keepers) == 1 else 'keep'} on chip in one kernel."
        )
        about = frozenset((view.key, buffer.name) for buffer in between)
        yield Finding("kept on chip", text, (view.key, *keepers), size, None, {view.key: tuple(touching)}, about)


def _held_by_one(view: _View, other: _View) -> Iterator[tuple[int, ...]]:
    """Kernels of `view` all of whose stages one kernel of `other` holds, and no other kernel there."""
    own, holders = view.holders, other.holders
    for index, kernel in enumerate(other.kernels):
        whole = {stage for stage in other.stages[index] if holders[stage] == [index]}
        multiplies = is_product(kernel) or kernel.kind in ("attention", "library", "custom")
        inside = tuple(
            i for i in sorted({i for stage in whole for i in own.get(stage, ())})
            if view.stages[i] <= whole and (multiplies or not is_product(view.kernels[i]))
        )  # fmt: skip
        if len(inside) > 1:
            yield inside


def _between(view: _View, indices: Sequence[int]) -> list[Buffer]:
    """Intermediates that only these kernels touch, largest first."""
    inside = set(indices)
    producers, consumers = view.graph.producers, view.graph.consumers
    return [
        buffer for buffer in view.graph.materialized
        if buffer.role == "intermediate" and consumers.get(buffer.name)
        and inside.issuperset(producers[buffer.name]) and inside.issuperset(consumers[buffer.name])
    ]  # fmt: skip


def _traffic(view: _View, buffer: Buffer, readers: Sequence[Part] = ("forward", "backward")) -> int:
    """Bytes of all writes of it, and of the reads in these parts."""
    total = 0
    users = {*view.graph.producers.get(buffer.name, ()), *view.graph.consumers.get(buffer.name, ())}
    for kernel in (view.kernels[index] for index in users):
        for access in (*((kernel.inputs or ()) if kernel.part in readers else ()), *(kernel.outputs or ())):
            if access.buffer == buffer.name:
                total += (buffer.bytes if access.bytes is None else access.bytes) * (kernel.launches or 1)
    return total


def _largest(view: _View) -> Iterator[Finding]:
    buffer = next((b for b in _passed_on(view) if b.role == "intermediate"), None)
    if buffer is None or not view.worth(size := _traffic(view, buffer)):
        return
    readers = view.graph.consumers[buffer.name]
    read = view.place(readers)
    text = (
        f"The largest intermediate that {view.name} writes to memory is {_described(view, buffer)}, read by {read}: "
        f"{formats.size(size)} of traffic."
    )
    kernels = {view.key: (*view.graph.producers[buffer.name], *readers)}
    yield Finding("largest", text, (view.key,), size, None, kernels, frozenset({(view.key, buffer.name)}))


def _passed_on(view: _View) -> list[Buffer]:
    """What one kernel writes and another reads, largest first."""
    return [buffer for buffer in view.graph.materialized if view.graph.consumers.get(buffer.name)]


def _missed(view: _View) -> Iterator[Finding]:
    named: dict[str, list[int]] = defaultdict(list)
    for index, kernel in enumerate(view.kernels):
        named[kernel.name].append(index)
    priced = [r for r in view.graph.reasons if r.bytes_saved and r.producer in named and r.consumer in named]
    if not priced:
        return
    best = max(priced, key=lambda reason: reason.bytes_saved or 0)
    size = best.bytes_saved or 0
    if not view.worth(size):
        return
    ends = [_work(view, named[name]) for name in (best.producer, best.consumer)]
    text = (
        f"The largest fusion that {view.name} did not make is {ends[0]} with {ends[1]}, which would save at most "
        f"{formats.size(size)}: {_because(view, best)}."
    )
    kernels = {view.key: (*named[best.producer], *named[best.consumer])}
    read = {buffer.name for index in named[best.consumer] for buffer in view.buffers(index, "inputs")}
    passed = [b for index in named[best.producer] for b in view.buffers(index, "outputs") if b.name in read]
    about = frozenset((view.key, buffer.name) for buffer in passed)
    yield Finding("missed", text, (view.key,), size, None, kernels, about)


def _because(view: _View, reason: Reason) -> str:
    if view.key == "xla-unfused":
        return "its fusion passes are off"
    words = reason.text if reason.code == "other" else REASONS[reason.code]
    return words.rstrip(".") or "for no reason that is known"


def _saved(views: Sequence[_View]) -> Iterator[Finding]:
    """What forward keeps for backward besides the block's own inputs and outputs."""
    training = [view for view in views if any(kernel.part == "backward" for kernel in view.kernels)]
    yield from _compared("saved", "saves {} for backward", {view: view.graph.saved for view in training}, ("backward",))


def _intermediates(views: Sequence[_View]) -> Iterator[Finding]:
    """All that is written to memory only for another kernel to read, where graphs differ in it."""
    kept = {view: [buffer for buffer in _passed_on(view) if buffer.role == "intermediate"] for view in views}
    if len(views) > 1:
        yield from _compared("intermediates", "writes {} of intermediates to memory", kept)


def _compared(
    sort: Sort, verb: str, kept: Mapping[_View, Sequence[Buffer]], readers: Sequence[Part] = ("forward", "backward")
) -> Iterator[Finding]:
    """The sizes of all graphs in one sentence, and what it costs the first more than the last to write them and to
    read them in these parts."""
    if not kept:
        return
    sizes = {view: sum(buffer.bytes for buffer in buffers) for view, buffers in kept.items()}
    first, *rest = sorted(sizes, key=lambda view: -sizes[view])
    traffic = sum(_traffic(first, buffer, readers) for buffer in kept[first])
    if rest:
        traffic -= sum(_traffic(rest[-1], buffer, readers) for buffer in kept[rest[-1]])
    if (not rest or sizes[first] > sizes[rest[-1]]) and first.worth(traffic):
        others = "".join(f", {view.name} {formats.size(sizes[view])}" for view in rest)
        cost = f"{formats.size(traffic)} " + (f"more traffic than {rest[-1].name}'s" if rest else "of traffic")
        text = f"{first.name} {verb.format(formats.size(sizes[first]))}{others}: {cost}."
        yield Finding(sort, text, tuple(view.key for view in (first, *rest)), traffic)


# Words.

# "inputs__gate_weight__.1" is how XLA writes inputs['gate_weight'].
_PARAMETER = re.compile(r"[A-Za-z]\w*?__([A-Za-z]\w*?)__(?:\.\d+)?$")


def _array(view: _View, buffer: Buffer) -> str:
    """An input by its name, what a kernel wrote by where it comes from."""
    writers = view.graph.producers.get(buffer.name)
    if writers:
        return f"the result of {view.maker(buffer)}"
    named = _PARAMETER.match(buffer.name)
    return formats.name(named[1] if named else buffer.name)


def _described(view: _View, buffer: Buffer) -> str:
    """Shape, size and origin."""
    maker, line = view.maker(buffer), formats.place(cause(view.graph, buffer.name).line)
    where = f" ({line})" if line and line != maker else ""
    return f"{formats.shape(buffer)}, {formats.size(buffer.bytes)}, written by {maker}{where}"


def _work(view: _View, indices: Sequence[int]) -> str:
    kernel = view.kernels[indices[0]]
    kind = "product" if is_product(kernel) else f"{kernel.kind} kernel"
    return f"the {kind} of {view.place(indices)}"


def _operations(view: _View, indices: Iterable[int]) -> str:
    return _series([token(op.op) for i in indices for op in view.kernels[i].source_ops if token(op.op) not in MOVEMENT])


def _named(place: str, ops: Iterable[str]) -> str:
    listed = ", ".join(ops)
    return f"{place} ({listed})" if place else listed


_NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


def _count(number: int) -> str:
    return _NUMBERS[number] if number < len(_NUMBERS) else str(number)


def _times(number: int) -> str:
    return "twice" if number == 2 else f"{_count(number)} times"


_LISTED = 8


def _series(words: Iterable[str], separator: str = ", ") -> str:
    """"a, b and c", each once, and of many the first."""
    listed = list(dict.fromkeys(word for word in words if word))
    if len(listed) > _LISTED:
        listed[_LISTED - 1 :] = [f"{len(listed) - _LISTED + 1} more"]
    if separator != ", " or len(listed) < 2:
        return separator.join(listed)
    return f"{', '.join(listed[:-1])} and {listed[-1]}"
