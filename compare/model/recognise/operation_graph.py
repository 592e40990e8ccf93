"""A program as a graph of operations with the same names for every compiler, in which blocks are recognised.

Equal operations on equal operands are one `Operation` with several occurrences, however many kernels compute it. Moves
are left out: an operand is the value before conversions, broadcasts, reshapes, transposes and copies. So one pattern
fits every layout and every fusion.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from ...graph.model import StepPhase

Shape: TypeAlias = tuple[int, ...]

# Operations whose result at a position depends on nothing else at other positions.
ELEMENTWISE = frozenset(
    "abs add and ceil clamp compare cos divide equal erf exp expm1 floor log log1p logistic maximum minimum multiply "
    "negate not or power remainder round-nearest-even rsqrt select shift-left shift-right-arithmetic "
    "shift-right-logical sign sin sqrt square subtract tan tanh xor".split()
)

_OPERANDS = {
    **dict.fromkeys(ELEMENTWISE, 1),
    **dict.fromkeys(
        "add and compare divide maximum minimum multiply or power remainder shift-left shift-right-arithmetic "
        "shift-right-logical subtract xor".split(), 2,
    ),
    **{"select": 3, "clamp": 3, "product": 2, "reduce-sum": 1, "reduce-max": 1, "mean": 1, "variance": 1},
}
_AT_LEAST = {"gather": 2, "attention": 3, "concatenate": 1, "slice": 1, "topk": 1, "sort": 1}
# A product of exchanged operands is the transposed product, the same value.
_COMMUTATIVE = frozenset("add and maximum minimum multiply or product xor".split())


class Occurrence(NamedTuple):
    """Where an operation is computed: the kernel's name in the fusion graph, the phase, and "file:line".

    The kernel is "" where the compiler's output does not say it.
    """

    kernel: str
    phase: StepPhase
    line: str


@dataclass(eq=False)
class Operation:
    """A value and the operation that computes it.

    op: the common name. Besides elementwise ones: "input", "constant", "iota", "axis" (see `OperationBuilder.moved`),
        "product", "reduce-sum", "reduce-max", "gather", "scatter", "slice", "concatenate", "attention", ...
    shape, dtype: of the result, dtype in HLO's short form. variants: (shape, dtype) of it and of its moved copies.
    operands: without moves. given: the (shape, dtype) with which each operand is given to the operation.
    facts: "value" of a scalar constant, "direction" of a comparison ("LT"), "axis" of an iota, "trailing" of a
        reduction, sizes of a product, and what an attention call says about itself.
    """

    number: int
    op: str
    shape: Shape
    dtype: str
    operands: tuple[Operation, ...]
    given: tuple[tuple[Shape, str], ...] = ()
    facts: dict[str, Any] = field(default_factory=dict)
    occurrences: dict[Occurrence, None] = field(default_factory=dict)
    users: list[Operation] = field(default_factory=list)
    variants: dict[tuple[Shape, str], None] = field(default_factory=dict)
    positional: bool = False

    def __repr__(self) -> str:
        operands = ", ".join(f"%{operand.number}" for operand in self.operands)
        return f"%{self.number} = {self.dtype}{list(self.shape)} {self.op}({operands})"

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def value(self) -> float | None:
        """The value of a scalar constant; None for everything else."""
        return self.facts.get("value") if self.op == "constant" else None

    def phases(self) -> set[StepPhase]:
        return {occurrence.phase for occurrence in self.occurrences}

    def in_shape(self, rank: int) -> list[Shape]:
        """Return the shapes of this rank that the value or a moved copy has."""
        return [shape for shape in dict.fromkeys(shape for shape, _ in self.variants) if len(shape) == rank]


@dataclass
class OperationGraph:
    """All operations of a program, operands before their users."""

    operations: list[Operation]

    def of(self, *ops: str) -> Iterator[Operation]:
        """Yield the operations of these names, in order."""
        return (operation for operation in self.operations if operation.op in ops)


class OperationBuilder:
    """Adds operations; equal ones become one."""

    def __init__(self) -> None:
        self._operations: list[Operation] = []
        self._known: dict[tuple[Any, ...], Operation] = {}

    def graph(self) -> OperationGraph:
        return OperationGraph(self._operations)

    def add(
        self,
        op: str,
        shape: Shape,
        dtype: str,
        operands: Sequence[Operation] = (),
        given: Sequence[tuple[Shape, str]] = (),
        occurrence: Occurrence | None = None,
        key: Any = (),
        **facts: Any,
    ) -> Operation:
        """Return the operation of these operands, and note its occurrence. key: what else tells it from others.

        It counts as an unknown operation, "other", with another number of operands than its name has, and without
        elements.
        """
        elements = math.prod(shape)
        if elements < 1 or len(operands) != _OPERANDS.get(op, len(operands)) or len(operands) < _AT_LEAST.get(op, 0):
            op, key = "other", (op, key)
        numbers = [operand.number for operand in operands]
        identity = (op, elements, key, *(sorted(numbers) if op in _COMMUTATIVE else numbers))
        known = self._known.get(identity)
        if known is None:
            known = self._new(op, shape, dtype, operands, given, facts)
            self._known[identity] = known
        known.variants[shape, dtype] = None
        if occurrence is not None:
            known.occurrences[occurrence] = None
        return known

    def unique(self, op: str, shape: Shape, dtype: str, operands: Sequence[Operation] = (), **facts: Any) -> Operation:
        """Return a new operation that equals no other one: an input, or the result of an unknown operation."""
        return self.add(op, shape, dtype, operands, key=("unique", len(self._operations)), **facts)

    def _new(
        self, op: str, shape: Shape, dtype: str, operands: Sequence[Operation], given: Sequence[tuple[Shape, str]],
        facts: dict[str, Any],
    ) -> Operation:
        made = Operation(len(self._operations), op, shape, dtype, tuple(operands), tuple(given), facts)
        made.positional = op in ("iota", "constant", "axis") or (
            (op in ELEMENTWISE or op == "gather") and all(operand.positional for operand in operands)
        )
        for operand in dict.fromkeys(operands):
            operand.users.append(made)
        self._operations.append(made)
        return made

    def moved(self, value: Operation, shape: Shape, dtype: str, axes: Sequence[int] | None = None) -> Operation:
        """Return a value after a conversion, broadcast, reshape, transpose or copy: the value itself.

        A vector of positions is the exception: positions along the last axis and along the one before make a mask, so
        its copy along another axis is an operation "axis", whose fact "axis" counts from the end.

        axes: of a broadcast, the result's axis of each axis of the value; None where the shapes show it.
        """
        value.variants[shape, dtype] = None
        if value.op in ("constant", "iota") and len(value.shape) != 1 or not value.positional or value.elements < 2:
            return value
        long = [axis for axis, size in enumerate(shape) if size > 1]
        if len(value.shape) == 1 and axes is not None and len(axes) == 1:
            from_end = len(shape) - axes[0]
        elif len(long) == 1:
            from_end = len(shape) - long[0]
        else:
            return value
        base = value.operands[0] if value.op == "axis" else value
        if from_end == 1:
            return base
        return self.add("axis", shape, dtype, [base], key=from_end, axis=from_end)

    def reduction(
        self, op: str, shape: Shape, dtype: str, operand: Operation, given: tuple[Shape, str], trailing: bool,
        occurrence: Occurrence | None,
    ) -> Operation:
        """Return a reduction. A sum of sums is one sum: compilers sum a long axis in two steps.

        trailing: it reduces the last axes.
        """
        if operand.op == op == "reduce-sum":
            trailing, given, operand = trailing and operand.facts["trailing"], operand.given[0], operand.operands[0]
        return self.add(op, shape, dtype, [operand], [given], occurrence, trailing, trailing=trailing)

    def product(
        self, result: Shape, dtype: str, operands: Sequence[Operation], given: Sequence[tuple[Shape, str]],
        summed: int, occurrence: Occurrence | None,
    ) -> Operation:
        """Return a batched product with its sizes `batch`, `m`, `n` and `k` as facts. summed: k."""
        left, right = (math.prod(shape) for shape, _ in given[:2])
        made, k = math.prod(result), max(summed, 1)
        batch = left * right // max(made * k * k, 1) or 1
        return self.add(
            "product", result, dtype, operands, given, occurrence, key=k,
            batch=batch, m=left // (batch * k), n=right // (batch * k), k=k,
        )


def ancestors(of: Iterable[Operation], limit: int = 10_000) -> Iterator[Operation]:
    """Yield the operations from which these are computed, themselves included, the nearest first."""
    waiting = list(of)
    seen = set(waiting)
    for operation in waiting:
        yield operation
        fresh = [operand for operand in operation.operands if operand not in seen]
        if len(seen) < limit:
            seen.update(fresh)
            waiting += dict.fromkeys(fresh)
