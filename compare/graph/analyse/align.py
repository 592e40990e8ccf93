"""The alignment of several fusion graphs: for each stage, the kernels that hold it in each graph.

Where fewer than two graphs name stages, operations take their place. They are matched by kind and dataflow order, and
the rows are marked `inferred`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

from ..model import PHASES, FusionGraph, Kernel, Phase, SourceOp
from ..operations import ANCHORS, MOVEMENT, token, tokens
from .totals import recomputed

Relation = Literal[
    "absent", "not named", "names no stages", "recomputed", "split", "merged", "joined", "parted", "regrouped",
    "same region",
]
Key = tuple[Phase, str]
_Computed = tuple[int, str, bool]


@dataclass(frozen=True)
class Cell:
    """One stage in one graph. kernels: launch indices; None where only its operations are known.

    relations: the differences from the row's first graph that holds the stage.
        "absent": no operation carries the stage.
        "not named": no operation carries the stage, but one of its phase has no stage and may belong to it.
        "names no stages": no operation of the whole graph carries a stage.
        "recomputed": a kernel repeats the work of another kernel, or work that checkpointing dropped. This relation
            does not depend on the first graph.
        "split", "merged": more kernels hold the stage, or fewer.
        "joined", "parted", "regrouped": as many kernels hold it, together with more stages, with fewer, or both.
        "same region": none of these.
    """

    kernels: tuple[int, ...] | None
    relations: tuple[Relation, ...] = ()


@dataclass(frozen=True)
class Row:
    """One stage of one phase in all graphs. inferred: `stage` is an operation's name."""

    stage: str
    phase: Phase
    cells: tuple[Cell, ...]
    inferred: bool = False

    @property
    def label(self) -> str:
        return f"backward: {self.stage}" if self.phase == "backward" else self.stage


@dataclass(frozen=True)
class Alignment:
    """The alignment of several graphs.

    rows: forward, then backward.
    unattributed: by graph, the kernels in no row.
    unaligned: by graph, the operations without a counterpart in all other graphs (inferred alignments only).
    """

    rows: tuple[Row, ...]
    unattributed: tuple[tuple[int, ...], ...]
    unaligned: tuple[tuple[SourceOp, ...], ...]

    def row(self, label: str) -> Row:
        """Return the row with this label. Raises KeyError that lists all labels."""
        for row in self.rows:
            if row.label == label:
                return row
        raise KeyError(f"no stage {label!r}; there are {', '.join(row.label for row in self.rows)}")


def align(graphs: Sequence[FusionGraph]) -> Alignment:
    """Return one row for each stage of any graph, in an order that keeps each graph's own.

    A nested stage ("norm/scale") is shortened to the depth that every graph with its outermost scope uses ("norm").
    If at least two graphs name stages, a graph that names none has empty cells. If fewer do, and another graph names
    none, all are aligned by operation. Products and attentions in dataflow order are the anchors. Between anchors, the
    longest common subsequence of operations is matched. Operations without a counterpart are `unaligned`, and so are
    products whose order is ambiguous.
    """
    if not graphs:
        return Alignment((), (), ())
    staged = [any(op.stage for op in _operations(graph)) for graph in graphs]
    if all(staged) or sum(staged) > 1:
        shorten = common_depth(graphs)
        held = [_by_stage(graph, shorten) for graph in graphs]
        unaligned: list[tuple[SourceOp, ...]] = [() for _ in graphs]
        inferred = False
    else:
        held, unaligned = _by_operation(graphs)
        inferred = True
    # An alignment by operation has the same rows in all graphs, in the order of the first.
    keys = list(held[0]) if inferred else _merged_order([list(stages) for stages in held])
    again = [_recomputing(graph) for graph in graphs]
    regions = [_Regions(stages) for stages in held]
    rows = [
        Row(key[1], key[0], tuple(_cells(key, graphs, regions, again)), inferred)
        for phase in PHASES for key in keys if key[0] == phase
    ]
    unattributed = []
    for graph, stages in zip(graphs, held, strict=True):
        named = {index for kernels in stages.values() for index in kernels}
        unattributed.append(tuple(index for index in range(len(graph.kernels or ())) if index not in named))
    return Alignment(tuple(rows), tuple(unattributed), tuple(unaligned))


def phase_of(kernel: Kernel, op: SourceOp) -> Phase:
    """Return an operation's phase: backward for a gradient, else its kernel's."""
    return "backward" if op.backward else kernel.phase


def _operations(graph: FusionGraph) -> Iterable[SourceOp]:
    return (op for _, _, op in _held_operations(graph))


def _held_operations(graph: FusionGraph) -> Iterator[tuple[int | None, Phase, SourceOp]]:
    """Yield (launch index, phase, operation) in launch order; the index is None in a graph without kernels."""
    for op in graph.operations if graph.kernels is None else ():
        yield None, "backward" if op.backward else "forward", op
    for index, kernel in enumerate(graph.kernels or ()):
        for op in kernel.source_ops:
            yield index, phase_of(kernel, op), op


Held = dict[Key, dict[int, list[SourceOp]]]


def _by_stage(graph: FusionGraph, shorten: Callable[[str], str]) -> Held:
    held: Held = defaultdict(lambda: defaultdict(list))
    for index, phase, op in _held_operations(graph):
        if op.stage:
            kernels = held[phase, shorten(op.stage)]
            if index is not None:
                kernels[index].append(op)
    return dict(held)


_DEEPEST = 64  # scopes; a hostile name may have a million, and all their prefixes would fill the memory


def common_depth(graphs: Sequence[FusionGraph]) -> Callable[[str], str]:
    """Return a function that cuts a stage to its longest prefix in all graphs that use its outermost scope."""
    prefixes: list[dict[str, set[str]]] = []
    for graph in graphs:
        by_root: dict[str, set[str]] = defaultdict(set)
        for stage in {op.stage for op in _operations(graph)}:
            names = stage.split("/", _DEEPEST)
            by_root[names[0]].update("/".join(names[:depth]) for depth in range(1, len(names) + 1))
        prefixes.append(by_root)

    @cache
    def shorten(stage: str) -> str:
        names = stage.split("/", _DEEPEST)
        known = [by_root[names[0]] for by_root in prefixes if names[0] in by_root]
        for depth in range(len(names), 1, -1):
            if all("/".join(names[:depth]) in used for used in known):
                return "/".join(names[:depth])
        return names[0]

    return shorten


def _merged_order(orders: Iterable[Sequence[Key]]) -> list[Key]:
    """Merge the orders: a key goes behind its predecessor; an order without shared keys goes to the end."""
    following: dict[Key | None, Key | None] = {None: None}  # a linked list; None stands before its head
    last: Key | None = None
    for order in orders:
        previous = None if any(key in following for key in order) else last
        for key in order:
            if key not in following:
                following[key], following[previous] = following[previous], key
                last = key if following[key] is None else last
            previous = key
    merged: list[Key] = []
    following_key = following[None]
    while following_key is not None:
        merged.append(following_key)
        following_key = following[following_key]
    return merged


def _recomputing(graph: FusionGraph) -> set[_Computed]:
    """Return (launch index, site, backward) of every computation that repeats one of an earlier kernel.

    Eager graphs have none: a library may use several kernels to compute one operation once.
    """
    if graph.compiler == "eager":
        return set()
    return {(index, found.op.site, found.op.backward) for found in recomputed(graph) for index in found.kernels[1:]}


def _cells(
    key: Key, graphs: Sequence[FusionGraph], regions: Sequence[_Regions], again: Sequence[set[_Computed]]
) -> Iterable[Cell]:
    first = next(i for i, own in enumerate(regions) if key in own.held)
    for i, (graph, own) in enumerate(zip(graphs, regions, strict=True)):
        if key not in own.held:
            yield Cell((), (_missing(key[0], graph, own.held),))
            continue
        if graph.kernels is None:
            yield Cell(None)
            continue
        repeated: list[Relation] = []
        if any(_repeats(index, op, again[i]) for index, ops in own.held[key].items() for op in ops):
            repeated.append("recomputed")
        compared: list[Relation] = []
        if i != first and graphs[first].kernels is not None:
            compared.append(_region_relation(key, regions[first], own))
            if repeated and compared == ["same region"]:
                compared = []
        yield Cell(tuple(own.held[key]), (*repeated, *compared))


def _repeats(index: int, op: SourceOp, again: set[_Computed]) -> bool:
    """Return whether the kernel repeats the operation; moving or converting data again does not count."""
    return token(op.op) not in MOVEMENT and (op.rematerialized or (index, op.site, op.backward) in again)


def _missing(phase: Phase, graph: FusionGraph, held: Held) -> Relation:
    """Return why no operation of the graph carries a stage of that phase."""
    if not held:
        return "names no stages"
    for kernel in graph.kernels or ():
        if kernel.phase != phase:
            continue
        if not kernel.source_ops and kernel.kind not in ("copy", "memset"):
            return "not named"
        if any(not op.stage and token(op.op) not in _NEUTRAL for op in kernel.source_ops):
            return "not named"
    return "absent"


# XLA concatenates the operands of products that it merges, and keeps the name of one of them.
_NEUTRAL = MOVEMENT - {"concatenate"}


def _region_relation(key: Key, there: _Regions, here: _Regions) -> Relation:
    more = len(here.held[key]) - len(there.held[key])
    if more:
        return "split" if more > 0 else "merged"
    with_here = {other for other in here.sharing(key) if other in there.held}
    with_there = {other for other in there.sharing(key) if other in here.held}
    if with_here == with_there:
        return "same region"
    return "joined" if with_here > with_there else "parted" if with_here < with_there else "regrouped"


class _Regions:
    """The stages that share a kernel in one graph."""

    def __init__(self, held: Held) -> None:
        self.held = held
        self._stages: dict[int, set[Key]] = defaultdict(set)
        for key, kernels in held.items():
            for index in kernels:
                self._stages[index].add(key)

    def sharing(self, key: Key) -> set[Key]:
        return {other for index in self.held[key] for other in self._stages[index]}


# Alignment by operation.


@dataclass(frozen=True)
class _Step:
    """One operation of the program with all kernels that compute it. layer: the number of anchor layers before it."""

    op: SourceOp
    token: str
    phase: Phase
    layer: int
    kernels: tuple[int, ...]


def _by_operation(graphs: Sequence[FusionGraph]) -> tuple[list[Held], list[tuple[SourceOp, ...]]]:
    steps = [_steps(graph) for graph in graphs]
    matched: list[list[_Step | None]] = [list(steps[0])]
    # Each graph is matched with the first one, so a row never depends on a chain of guesses.
    for other in steps[1:]:
        partner = {id(a): b for a, b in _match(steps[0], other)}
        matched.append([partner.get(id(step)) for step in steps[0]])
    held: list[Held] = [{} for _ in graphs]
    aligned: list[set[int]] = [set() for _ in graphs]
    ordinals: Counter[tuple[Phase, str]] = Counter()
    for row in zip(*matched, strict=True):
        if any(step is None for step in row):
            continue
        present = [step for step in row if step is not None]
        name = present[0].token
        ordinals[present[0].phase, name] += 1
        key = (present[0].phase, f"{name} {ordinals[present[0].phase, name]}")
        for i, step in enumerate(present):
            held[i][key] = {index: [step.op] for index in step.kernels}
            aligned[i].add(id(step))
    left = [
        tuple(step.op for step in own if id(step) not in aligned[i]) for i, own in enumerate(steps)
    ]
    return held, left


def _steps(graph: FusionGraph) -> list[_Step]:
    """Return the steps in launch order, each site once; data movement is no step."""
    names = [name for kernel in graph.kernels or () for name in tokens(kernel)]
    if graph.kernels is None:
        names = [token(op.op) for op in graph.operations]
    layers = _layers(graph)
    found: dict[object, tuple[SourceOp, str, Phase, int, list[int]]] = {}
    for position, (index, phase, op) in enumerate(_held_operations(graph)):
        name = names[position]
        if name in MOVEMENT:
            continue
        identity: object = (phase, op.site) if op.site else position
        if identity in found:
            if index is not None and index not in found[identity][4]:
                found[identity][4].append(index)
            continue
        found[identity] = (op, name, phase, layers[position], [] if index is None else [index])
    return [_Step(op, name, phase, layer, tuple(kernels)) for op, name, phase, layer, kernels in found.values()]


def _layers(graph: FusionGraph) -> list[int]:
    """Return, for each operation, the number of anchors on the longest path to it.

    Within a kernel, operations before the anchor are computed before it. A graph without kernels has no dataflow, so
    each anchor starts a new layer.
    """
    layers: list[int] = []
    if graph.kernels is None:
        seen = 0
        for op in graph.operations:
            layers.append(seen)
            seen += token(op.op) in ANCHORS
        return layers
    ready: dict[str, int] = {}
    for kernel in graph.kernels:
        before = max((ready.get(access.buffer, 0) for access in kernel.inputs or ()), default=0)
        depth, passed = before, False
        for name in tokens(kernel):
            layers.append(depth)
            if name in ANCHORS:
                passed = True
            elif passed:
                depth = before + 1
                layers[-1] = depth
        after = before + passed
        for access in kernel.outputs or ():
            ready[access.buffer] = max(after, ready.get(access.buffer, 0))
    return layers


def _match(left: Sequence[_Step], right: Sequence[_Step]) -> list[tuple[_Step, _Step]]:
    """Return the pairs of steps that are the same operation of the same phase."""
    pairs: list[tuple[_Step, _Step]] = []
    for phase in PHASES:
        a, b = ([step for step in steps if step.phase == phase] for steps in (left, right))
        anchors_a, anchors_b = _anchors(a), _anchors(b)
        if [step.token for step in anchors_a] != [step.token for step in anchors_b]:
            continue
        certain_a, certain_b = _certain(anchors_a), _certain(anchors_b)
        pairs += [(x, y) for x, y, *sure in zip(anchors_a, anchors_b, certain_a, certain_b, strict=True) if all(sure)]
        breaks = _breaks(anchors_a) & _breaks(anchors_b)
        segments_a, segments_b = _segments(a, anchors_a, breaks), _segments(b, anchors_b, breaks)
        for number, steps in segments_a.items():
            pairs += _common_subsequence(steps, segments_b.get(number, []))
    order = {id(step): position for position, step in enumerate(left)}
    return sorted(pairs, key=lambda pair: order[id(pair[0])])


def _anchors(steps: Sequence[_Step]) -> list[_Step]:
    """Return the anchors by layer, then by source line; compilers launch independent ones in any order."""
    return sorted((step for step in steps if step.token in ANCHORS), key=lambda step: (step.layer, _line(step.op)))


def _line(op: SourceOp) -> tuple[str, int]:
    file, _, number = op.line.rpartition(":")
    return file, int(number) if number.isdecimal() else 0


def _certain(anchors: Sequence[_Step]) -> list[bool]:
    """Return for each anchor whether its place in its layer is certain: it is alone, or lines of one file order it."""
    layers: dict[int, Counter[tuple[str, int]]] = defaultdict(Counter)
    for anchor in anchors:
        layers[anchor.layer][_line(anchor.op)] += 1
    result = []
    for anchor in anchors:
        lines, own = layers[anchor.layer], _line(anchor.op)
        told = own[1] > 0 and lines[own] == 1 and len({file for file, _ in lines}) == 1
        result.append(told or lines.total() == 1)
    return result


def _breaks(anchors: Sequence[_Step]) -> set[int]:
    """Return the positions in the list of anchors where a layer begins, and the list's end."""
    return {i for i in range(1, len(anchors)) if anchors[i - 1].layer != anchors[i].layer} | {0, len(anchors)}


def _segments(steps: Sequence[_Step], anchors: Sequence[_Step], breaks: set[int]) -> dict[int, list[_Step]]:
    """Group the other steps by the last break before them: only anchors before it can feed them."""
    segments: dict[int, list[_Step]] = defaultdict(list)
    layers, places = [anchor.layer for anchor in anchors], sorted(breaks)
    for step in steps:
        if step.token not in ANCHORS:
            before = bisect_left(layers, step.layer)
            segments[places[bisect_left(places, before)]].append(step)
    return segments


_LONGEST = 4_000_000  # cells of the table below; a larger segment stays unaligned


def _common_subsequence(a: Sequence[_Step], b: Sequence[_Step]) -> list[tuple[_Step, _Step]]:
    """Return the longest common subsequence, compared by token."""
    if len(a) * len(b) > _LONGEST:
        return []
    length = [[0] * (len(b) + 1) for _ in range(len(a) + 1)]
    for i in range(len(a) - 1, -1, -1):
        for j in range(len(b) - 1, -1, -1):
            same = a[i].token == b[j].token
            length[i][j] = length[i + 1][j + 1] + 1 if same else max(length[i + 1][j], length[i][j + 1])
    pairs, i, j = [], 0, 0
    while i < len(a) and j < len(b):
        if a[i].token == b[j].token:
            pairs.append((a[i], b[j]))
            i, j = i + 1, j + 1
        elif length[i + 1][j] >= length[i][j + 1]:
            i += 1
        else:
            j += 1
    return pairs
