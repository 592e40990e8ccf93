"""The differences between two fusion graphs of one program, before and after an upgrade or a flag.

Kernels are matched by their contents (operations with lines and stages, kind, shapes, and the library or code generator
that they come from), never by name. So a compiler's renumbering is no difference. Measured times and runtime names are
no difference either, nor are the lines of the same operations: an edit above them, or another folder, moves them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from ..buffer_edges import connected
from ..model import Access, Buffer, FusionGraph, Kernel, Reason, SourceOp
from ..operations import token
from .missed_fusions import missed
from .totals import declared_bytes, difference, tally

ChangeKind = Literal["split", "merged", "regrouped", "appeared", "vanished", "bytes", "kind", "operations", "code"]

_Signature = Callable[[int, Kernel], Hashable]
_Node = tuple[int, int]  # a side, and the index of a kernel in it

# The facts that tell a kernel's library, Triton, or emitter.
_CODE = ("custom_call_target", "fusion_kind", "extern", "template")


@dataclass(frozen=True)
class KernelChange:
    """A change from kernels of the first graph to kernels of the second.

    kind:
        "split": one kernel became several.
        "merged": several became one.
        "regrouped": several became several others.
        "appeared", "vanished": there is no counterpart.
        "bytes": one kernel's arrays or number of launches changed.
        "kind": one kernel's kind changed.
        "operations": one kernel's operations changed.
        "code": the same work comes from another library or code generator.
    before, after: launch indices in the two graphs.
    bytes: declared bytes after minus before; None where a kernel's are unknown.
    time_us: measured time after minus before; None unless all of the kernels were measured.
    """

    kind: ChangeKind
    before: tuple[int, ...]
    after: tuple[int, ...]
    stages: tuple[str, ...]
    bytes: float | None
    time_us: float | None


@dataclass(frozen=True)
class BufferChange:
    """An intermediate or residual that only one of the graphs writes to memory.

    materialized: the second graph writes it. lines: of the operations in the kernel that writes it.
    """

    materialized: bool
    buffer: Buffer
    lines: tuple[str, ...]

    @property
    def bytes(self) -> int:
        return self.buffer.bytes if self.materialized else -self.buffer.bytes


@dataclass(frozen=True)
class ReasonChange:
    """Two kernels that both graphs have, with different reasons for not being fused.

    producer, consumer: names in the graph that has a reason. before, after: codes, empty where there was no reason.
    """

    producer: str
    consumer: str
    before: tuple[str, ...]
    after: tuple[str, ...]


@dataclass(frozen=True)
class GraphDiff:
    """All differences; each list is sorted by bytes, or by µs where all changes were measured."""

    kernels: tuple[KernelChange, ...] = ()
    buffers: tuple[BufferChange, ...] = ()
    reasons: tuple[ReasonChange, ...] = ()

    @property
    def empty(self) -> bool:
        return not (self.kernels or self.buffers or self.reasons)


def diff(a: FusionGraph, b: FusionGraph) -> GraphDiff:
    """Return the differences from `a` to `b`.

    In graphs of operations only, each operation counts as a kernel. Raises ValueError if only one graph has kernels.
    """
    if (a.kernels is None) != (b.kernels is None):
        without = a if a.kernels is None else b
        raise ValueError(f"{without.name} has operations and no kernels; compare it with another graph without kernels")
    matching = _Matching(a, b)
    changes = [matching.change(before, after) for before, after in matching.changed]
    timed = all(change.time_us is not None for change in changes)
    changes.sort(key=lambda change: -abs((change.time_us if timed else change.bytes) or 0))
    return GraphDiff(tuple(changes), _buffers(a, b), _reasons(a, b, matching))


class _Matching:
    """The kernels that both graphs have, and the groups of kernels that changed."""

    def __init__(self, a: FusionGraph, b: FusionGraph) -> None:
        self.sides = kernels_of(a), kernels_of(b)
        self._graphs = a, b
        self.same = self._ends()
        left, right = (
            sorted(set(range(len(kernels))) - {pair[i] for pair in self.same}) for i, kernels in enumerate(self.sides)
        )
        self.changed: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        same: list[_Signature] = [self._exact, self._arrays, partial(self._arrays, lines=False)]
        changed: list[_Signature] = [self._contents, partial(self._contents, lines=False)]
        for signature in same + changed:
            pairs = self._pair(left, right, signature)
            left, right = (sorted(set(rest) - {pair[i] for pair in pairs}) for i, rest in enumerate((left, right)))
            self.same += pairs
            if signature in changed:
                self.changed += [((i,), (j,)) for i, j in pairs]
        for before, after in self._components(left, right):
            self.changed.append((before, after))
            if len(before) == len(after) == 1:
                self.same.append((before[0], after[0]))

    def change(self, before: tuple[int, ...], after: tuple[int, ...]) -> KernelChange:
        old, new = ([self.sides[i][index] for index in side] for i, side in enumerate((before, after)))
        return KernelChange(
            _kind(old, new), before, after,
            tuple(dict.fromkeys(stage for kernel in (*old, *new) for stage in kernel.stages)),
            difference(*(tally(map(declared_bytes, kernels)) for kernels in (new, old))),
            difference(*(tally(kernel.device_time_us for kernel in kernels) for kernels in (new, old))),
        )

    def _ends(self) -> list[tuple[int, int]]:
        """Return the pairs of the common beginning and end, so that equal kernels are matched at their own places."""
        signatures = [[self._exact(side, kernel) for kernel in kernels] for side, kernels in enumerate(self.sides)]
        short = min(map(len, signatures))
        head = next((i for i in range(short) if signatures[0][i] != signatures[1][i]), short)
        tail = next((i for i in range(short - head) if signatures[0][-1 - i] != signatures[1][-1 - i]), short - head)
        lengths = len(self.sides[0]), len(self.sides[1])
        return [(i, i) for i in range(head)] + [(lengths[0] - 1 - i, lengths[1] - 1 - i) for i in range(tail)]

    def _exact(self, side: int, kernel: Kernel) -> Hashable:
        return self._arrays(side, kernel), frozenset(Counter(op.site for op in kernel.source_ops).items())

    def _arrays(self, side: int, kernel: Kernel, lines: bool = True) -> Hashable:
        """Return the contents, launches and shapes, but no sites: they may contain the compiler's numbers."""
        graph = self._graphs[side]
        shapes = _shapes(graph, kernel.inputs), _shapes(graph, kernel.outputs)
        return self._contents(side, kernel, lines), _code(kernel), kernel.launches, shapes

    def _contents(self, side: int, kernel: Kernel, lines: bool = True) -> Hashable:
        return kernel.phase, kernel.kind, frozenset(_operations(kernel, lines).items())

    def _pair(self, left: Iterable[int], right: Iterable[int], signature: _Signature) -> list[tuple[int, int]]:
        """Return pairs of kernels with equal signatures, in launch order."""
        waiting: dict[Hashable, list[int]] = defaultdict(list)
        for index in right:
            waiting[signature(1, self.sides[1][index])].append(index)
        pairs = []
        for index in left:
            if found := waiting[signature(0, self.sides[0][index])]:
                pairs.append((index, found.pop(0)))
        return pairs

    def _components(
        self, left: Sequence[int], right: Sequence[int]
    ) -> Iterable[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Yield groups of the unmatched kernels that common operations connect."""
        nodes = [(0, index) for index in left] + [(1, index) for index in right]
        pairs = [(node, node) for node in nodes]  # a kernel without a counterpart is a group, too
        joined = self._joined(nodes)
        placed = {node for pair in joined for node in pair}
        pairs += joined + self._joined([node for node in nodes if node not in placed], lines=False)
        for group in connected(pairs):
            yield tuple(sorted(i for side, i in group if side == 0)), tuple(sorted(i for side, i in group if side == 1))

    def _joined(self, nodes: Iterable[_Node], lines: bool = True) -> list[tuple[_Node, _Node]]:
        """Return pairs of kernels with an operation that both sides have. lines: it is at the same line, too."""
        holders: dict[Hashable, tuple[list[_Node], ...]] = defaultdict(lambda: ([], []))
        for node in nodes:
            for key in self._keys(node, lines):
                holders[key][node[0]].append(node)
        return [(a[0], node) for a, b in holders.values() if a and b for node in (*a[1:], *b)]

    def _keys(self, node: _Node, lines: bool) -> set[Hashable]:
        kernel = self.sides[node[0]][node[1]]
        placed = (op for op in kernel.source_ops if op.stage or lines and (op.line or op.site))
        return {(kernel.phase, _identity(op, lines)) for op in placed}


def _code(kernel: Kernel) -> tuple[str, ...]:
    return tuple(str(kernel.facts.get(name) or "") for name in _CODE)


def kernels_of(graph: FusionGraph) -> tuple[Kernel, ...]:
    """Return the kernels; of a graph of operations only, each operation as a kernel."""
    if graph.kernels is not None:
        return graph.kernels
    return tuple(Kernel(op.op, "elementwise", source_ops=(op,)) for op in graph.operations)


def _operations(kernel: Kernel, lines: bool) -> Counter[tuple[str, str, str, bool]]:
    return Counter(_identity(op, lines) for op in kernel.source_ops)


def _identity(op: SourceOp, lines: bool) -> tuple[str, str, str, bool]:
    """Return an operation's identity across compiles; it contains the site only if nothing else places it.

    lines: of one program, so that they place it, too.
    """
    line = (op.line or ("" if op.stage else op.site)) if lines else ""
    return token(op.op), op.stage, line, op.backward


def _shapes(graph: FusionGraph, accesses: tuple[Access, ...] | None) -> Hashable:
    if accesses is None:
        return None
    found: Counter[Hashable] = Counter()
    for access in accesses:
        buffer = graph.buffer[access.buffer]
        found[buffer.shape, buffer.dtype, buffer.role, access.bytes] += 1
    return frozenset(found.items())


def _kind(old: Sequence[Kernel], new: Sequence[Kernel]) -> ChangeKind:
    match min(len(old), 2), min(len(new), 2):
        case 0, _:
            return "appeared"
        case _, 0:
            return "vanished"
        case 1, 2:
            return "split"
        case 2, 1:
            return "merged"
        case 2, 2:
            return "regrouped"
    if old[0].kind != new[0].kind:
        return "kind"
    if _operations(old[0], lines=False) != _operations(new[0], lines=False):
        return "operations"
    return "bytes" if _code(old[0]) == _code(new[0]) else "code"


def _buffers(a: FusionGraph, b: FusionGraph) -> tuple[BufferChange, ...]:
    """Return, by role, shape and dtype, the buffers that one graph has more of than the other."""
    found = []
    for graph, other, materialized in ((a, b, False), (b, a, True)):
        others: Counter[Hashable] = Counter(map(_shape, other.materialized))
        known_lines = {(_shape(x), _lines(other, x)) for x in other.materialized}
        own: dict[Hashable, list[Buffer]] = defaultdict(list)
        # Nothing tells for certain which of several equal buffers are new. Those with new lines go last, where the
        # surplus is taken from.
        for buffer in sorted(graph.materialized, key=lambda x: (_shape(x), _lines(graph, x)) not in known_lines):
            own[_shape(buffer)].append(buffer)
        for key, buffers in own.items():
            found += [BufferChange(materialized, x, _lines(graph, x)) for x in buffers[others[key] :]]
    return tuple(sorted(found, key=lambda change: -abs(change.bytes)))


def _shape(buffer: Buffer) -> Hashable:
    return buffer.role, buffer.shape, buffer.dtype


def _lines(graph: FusionGraph, buffer: Buffer) -> tuple[str, ...]:
    writers = graph.producers[buffer.name]
    return tuple(dict.fromkeys(line for index in writers for line in (graph.kernels or ())[index].lines))


def _reasons(a: FusionGraph, b: FusionGraph, matching: _Matching) -> tuple[ReasonChange, ...]:
    """Return changed reasons of kernel pairs that both graphs have; the other kernels have a KernelChange."""
    by_pair = [
        _paired_reasons(graph, {pair[side]: number for number, pair in enumerate(matching.same)})
        for side, graph in enumerate((a, b))
    ]
    changes: list[tuple[int, ReasonChange]] = []
    for key in dict.fromkeys((*by_pair[0], *by_pair[1])):
        sides = [side.get(key, []) for side in by_pair]
        before, after = (_codes(key, reasons) for reasons in sides)
        if before != after:
            both = sides[1] + sides[0]
            change = ReasonChange(both[0].producer, both[0].consumer, before, after)
            changes.append((max(reason.bytes_saved or 0 for reason in both), change))
    return tuple(change for _, change in sorted(changes, key=lambda sized: -sized[0]))


# The numbers of a kernel's pairs (several kernels may share a name); None where a name led to no kernel.
_End = frozenset[int] | None


def _paired_reasons(graph: FusionGraph, numbers: Mapping[int, int]) -> dict[tuple[_End, _End], list[Reason]]:
    """Return the reasons of kernels that have a counterpart, by pair of kernels."""
    by_pair: dict[tuple[_End, _End], list[Reason]] = defaultdict(list)
    for reason in missed(graph):
        ends = [graph.named.get(name, ()) for name in (reason.producer, reason.consumer)]
        if all(index in numbers for end in ends for index in end):
            producer, consumer = (frozenset(numbers[index] for index in end) if end else None for end in ends)
            by_pair[producer, consumer].append(reason)
    return by_pair


def _codes(key: tuple[_End, _End], reasons: Iterable[Reason]) -> tuple[str, ...]:
    """Return a pair's codes, each once; without a known pair, each reason counts."""
    codes = sorted(reason.code for reason in reasons)
    return tuple(codes) if None in key else tuple(dict.fromkeys(codes))
