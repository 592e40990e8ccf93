"""The alignment of several fusion graphs: for each stage, the kernels of each graph that compute it.

If fewer than two graphs name stages, the graphs are aligned by operation instead. Operations are matched by kind and
dataflow order, and the rows are marked `inferred`.
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
from .totals import repeated

Relation = Literal[
    "absent", "not named", "names no stages", "recomputed", "split", "merged", "joined", "parted", "regrouped",
    "same region",
]
Key = tuple[Phase, str]
_Computed = tuple[int, str, bool]


@dataclass(frozen=True)
class Cell:
    """One stage in one graph. kernels: the launch indices of its kernels; None if the graph lists only operations.

    relations: the differences from the row's first graph that holds the stage.
        "absent": no operation has the stage.
        "not named": no operation has the stage, but an operation or kernel of its phase without one may belong to it.
        "names no stages": no operation of the whole graph has a stage.
        "recomputed": a kernel repeats the work of another kernel, or work that checkpointing dropped. This relation
            does not depend on the first graph.
        "split", "merged": more kernels hold the stage, or fewer.
        "joined", "parted", "regrouped": as many kernels hold it, but they hold more other stages, fewer, or others.
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
    unattributed: for each graph, the kernels in no row.
    unaligned: for each graph, the operations without a counterpart in some other graph (inferred alignments only).
    """

    rows: tuple[Row, ...]
    unattributed: tuple[tuple[int, ...], ...]
    unaligned: tuple[tuple[SourceOp, ...], ...]

    def row(self, label: str) -> Row:
        """Return the row with this label. Raises KeyError, with all labels, if there is none."""
        for row in self.rows:
            if row.label == label:
                return row
        raise KeyError(f"no stage {label!r}; there are {', '.join(row.label for row in self.rows)}")


def align(graphs: Sequence[FusionGraph]) -> Alignment:
    """Return one row for each stage of any graph. The rows keep the order of stages within each graph.

    By stage, if at least two graphs or all of them name stages: a graph that names none has empty cells. A nested stage
    ("norm/scale") is cut to the depth that all graphs with its outermost scope have in common ("norm").

    By operation, otherwise: products and attentions, in dataflow order, are the anchors. Between anchors, the longest
    common subsequence of operations is matched. Operations without a counterpart are `unaligned`. Products whose order
    is ambiguous are also `unaligned`.
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
    # Aligned by operation, all graphs have the same rows, in the order of the first graph.
    keys = list(held[0]) if inferred else _merged_order([list(stages) for stages in held])
    # In eager graphs nothing repeats, because a library may use several kernels to compute one operation once.
    again = [set() if graph.compiler == "eager" else repeated(graph) for graph in graphs]
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


# Nested scopes of a stage. A hostile name may have a million, and all their prefixes would fill the memory.
_MAX_SCOPES = 64


def common_depth(graphs: Sequence[FusionGraph]) -> Callable[[str], str]:
    """Return a function that cuts a stage to the longest prefix in all graphs that have its outermost scope."""
    prefixes: list[dict[str, set[str]]] = []
    for graph in graphs:
        by_root: dict[str, set[str]] = defaultdict(set)
        for stage in {op.stage for op in _operations(graph)}:
            names = stage.split("/", _MAX_SCOPES)
            by_root[names[0]].update("/".join(names[:depth]) for depth in range(1, len(names) + 1))
        prefixes.append(by_root)

    @cache
    def shorten(stage: str) -> str:
        names = stage.split("/", _MAX_SCOPES)
        known = [by_root[names[0]] for by_root in prefixes if names[0] in by_root]
        for depth in range(len(names), 1, -1):
            if all("/".join(names[:depth]) in used for used in known):
                return "/".join(names[:depth])
        return names[0]

    return shorten


def _merged_order(orders: Iterable[Sequence[Key]]) -> list[Key]:
    """Merge the orders: a new key follows its predecessor. An order without a known key goes last."""
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
        repeats: list[Relation] = []
        if any(_repeats(index, op, again[i]) for index, ops in own.held[key].items() for op in ops):
            repeats.append("recomputed")
        compared: list[Relation] = []
        if i != first and graphs[first].kernels is not None:
            compared.append(_region_relation(key, regions[first], own))
            if repeats and compared == ["same region"]:
                compared = []
        yield Cell(tuple(own.held[key]), (*repeats, *compared))


def _repeats(index: int, op: SourceOp, again: set[_Computed]) -> bool:
    """Return whether the kernel computes the operation again. Repeated moves and conversions of data do not count."""
    return token(op.op) not in MOVEMENT and (op.rematerialized or (index, op.site, op.backward) in again)


def _missing(phase: Phase, graph: FusionGraph, held: Held) -> Relation:
    """Return the reason why the graph has no operation of a stage of that phase."""
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


# A concatenate without a stage may belong to one: XLA concatenates the operands of products that it merges, and keeps
# the name of one product.
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
    """The stages of one graph, and which of them share a kernel."""

    def __init__(self, held: Held) -> None:
        self.held = held
        self._stages: dict[int, set[Key]] = defaultdict(set)
        for key, kernels in held.items():
            for index in kernels:
                self._stages[index].add(key)

    def sharing(self, key: Key) -> set[Key]:
        return {other for index in self.held[key] for other in self._stages[index]}


# Alignment by operation.


@dataclass(eq=False)
class _Step:
    """One operation of the program and all kernels that compute it. layer: as returned by `_layers`.

    Equal operations are different steps.
    """

    op: SourceOp
    token: str
    phase: Phase
    layer: int
    kernels: list[int]


def _by_operation(graphs: Sequence[FusionGraph]) -> tuple[list[Held], list[tuple[SourceOp, ...]]]:
    steps = [_steps(graph) for graph in graphs]
    matched: list[list[_Step | None]] = [list(steps[0])]
    # Each graph is matched with the first graph, not with its neighbour, so errors do not add up along the list.
    for other in steps[1:]:
        partner = dict(_match(steps[0], other))
        matched.append([partner.get(step) for step in steps[0]])
    held: list[Held] = [{} for _ in graphs]
    aligned: list[set[_Step]] = [set() for _ in graphs]
    ordinals: Counter[tuple[Phase, str]] = Counter()
    for row in zip(*matched, strict=True):
        present = [step for step in row if step is not None]
        if len(present) < len(row):
            continue
        name = present[0].token
        ordinals[present[0].phase, name] += 1
        key = (present[0].phase, f"{name} {ordinals[present[0].phase, name]}")
        for i, step in enumerate(present):
            held[i][key] = {index: [step.op] for index in step.kernels}
            aligned[i].add(step)
    return held, [tuple(step.op for step in own if step not in aligned[i]) for i, own in enumerate(steps)]


def _steps(graph: FusionGraph) -> list[_Step]:
    """Return the steps in launch order, one for each site. Data movement is not a step."""
    names = [name for kernel in graph.kernels or () for name in tokens(kernel)]
    if graph.kernels is None:
        names = [token(op.op) for op in graph.operations]
    layers = _layers(graph)
    steps: dict[object, _Step] = {}
    for position, (index, phase, op) in enumerate(_held_operations(graph)):
        name = names[position]
        if name in MOVEMENT:
            continue
        identity: object = (phase, op.site) if op.site else position
        step = steps.setdefault(identity, _Step(op, name, phase, layers[position], []))
        if index is not None and index not in step.kernels:
            step.kernels.append(index)
    return list(steps.values())


def _layers(graph: FusionGraph) -> list[int]:
    """Return, for each operation, the number of anchors on the longest path to it.

    A kernel computes the operations that it lists before its anchor first. A graph without kernels has no dataflow, so
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
    """Return the pairs of steps that compute the same operation in the same phase."""
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
    order = {step: position for position, step in enumerate(left)}
    return sorted(pairs, key=lambda pair: order[pair[0]])


def _anchors(steps: Sequence[_Step]) -> list[_Step]:
    """Return the anchors by layer, then by source line, because compilers launch independent anchors in any order."""
    return sorted((step for step in steps if step.token in ANCHORS), key=lambda step: (step.layer, _line(step.op)))


def _line(op: SourceOp) -> tuple[str, int]:
    file, _, number = op.line.rpartition(":")
    return file, int(number) if number.isdecimal() else 0


def _certain(anchors: Sequence[_Step]) -> list[bool]:
    """Return, for each anchor, whether its position in its layer is certain.

    It is if the layer has no other anchor, or if its anchors are in one file and no other one is on the same line.
    """
    layers: dict[int, Counter[tuple[str, int]]] = defaultdict(Counter)
    for anchor in anchors:
        layers[anchor.layer][_line(anchor.op)] += 1
    result = []
    for anchor in anchors:
        lines, own = layers[anchor.layer], _line(anchor.op)
        ordered = own[1] > 0 and lines[own] == 1 and len({file for file, _ in lines}) == 1
        result.append(ordered or lines.total() == 1)
    return result


def _breaks(anchors: Sequence[_Step]) -> set[int]:
    """Return the indices in `anchors` where a layer begins, and the length of the list."""
    return {i for i in range(1, len(anchors)) if anchors[i - 1].layer != anchors[i].layer} | {0, len(anchors)}


def _segments(steps: Sequence[_Step], anchors: Sequence[_Step], breaks: set[int]) -> dict[int, list[_Step]]:
    """Group the steps other than anchors by break. All anchors that can feed a group come before its break."""
    segments: dict[int, list[_Step]] = defaultdict(list)
    layers, ordered_breaks = [anchor.layer for anchor in anchors], sorted(breaks)
    for step in steps:
        if step.token not in ANCHORS:
            before = bisect_left(layers, step.layer)
            segments[ordered_breaks[bisect_left(ordered_breaks, before)]].append(step)
    return segments


_MAX_TABLE_CELLS = 4_000_000  # of the table below; a larger segment stays unaligned


def _common_subsequence(a: Sequence[_Step], b: Sequence[_Step]) -> list[tuple[_Step, _Step]]:
    """Return the longest common subsequence, compared by token."""
    if len(a) * len(b) > _MAX_TABLE_CELLS:
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
