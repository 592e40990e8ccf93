"""Formulas that several blocks share: factors, quotients, means, squares, sigmoids, softmaxes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from .operation_graph import Operation, OperationGraph, ancestors

_NEAR = 0.01  # constants are rounded to bfloat16


def near(value: float | None, wanted: float) -> bool:
    return value is not None and abs(value - wanted) <= _NEAR * abs(wanted)


def factors(operation: Operation, depth: int = 8) -> list[Operation]:
    """Return the factors of a chain of multiplications; a / b counts a alone and the quotient's operation."""
    if operation.op == "multiply" and depth:
        return [factor for operand in operation.operands for factor in factors(operand, depth - 1)]
    return [operation]


def without_constants(operation: Operation) -> Operation:
    """Return x of c x, x / c and x + c."""
    for _ in range(8):
        constant = [operand.op == "constant" for operand in operation.operands]
        if operation.op not in ("multiply", "divide", "add", "subtract") or sum(constant) != 1:
            break
        operation = operation.operands[constant.index(False)]
    return operation


def product_behind(operation: Operation) -> Operation | None:
    """Return the product of which this is the result, a slice of the result, or the result plus a bias."""
    for _ in range(8):
        if operation.op == "product":
            return operation
        if operation.op in ("slice", "add") and operation.operands:
            full = [o for o in operation.operands if o.elements >= operation.elements and not o.positional]
            behind = [o for o in full if o.op in ("product", "slice", "add")]
            if not behind:
                return None
            operation = behind[0]
        else:
            return None
    return None


def quotient(operation: Operation) -> tuple[Operation, Operation] | None:
    """Return (a, b) of a / b, also written as a * (1 / b)."""
    if operation.op == "divide":
        return operation.operands[0], operation.operands[1]
    if operation.op == "multiply":
        for first, second in (operation.operands, operation.operands[::-1]):
            if second.op == "divide" and near(second.operands[0].value, 1.0):
                return first, second.operands[1]
    return None


def square_of(operation: Operation) -> Operation | None:
    if operation.op == "multiply" and operation.operands[0] is operation.operands[1]:
        base = operation.operands[0]
    elif operation.op == "square" or (operation.op == "power" and near(operation.operands[1].value, 2.0)):
        base = operation.operands[0]
    else:
        return None
    return base.operands[0] if base.op == "abs" else base


@dataclass(frozen=True)
class Mean:
    """The mean of `count` values of `of`. trailing: those along the last axes."""

    of: Operation
    count: int
    trailing: bool
    operations: tuple[Operation, ...]


def mean_of(operation: Operation) -> Mean | None:
    """Recognise sum(x) / n or sum(x) * (1 / n), where n is the number of values in each sum."""
    if operation.op == "mean":
        of = operation.operands[0]
        return Mean(of, of.elements // max(operation.elements, 1), operation.facts["trailing"], (operation,))
    if operation.op not in ("multiply", "divide"):
        return None
    for total, scale in (operation.operands, operation.operands[::-1]):
        if total.op != "reduce-sum" or scale.value is None:
            continue
        of = total.operands[0]
        count = of.elements // max(total.elements, 1)
        if count and near(scale.value, count if operation.op == "divide" else 1 / count):
            return Mean(of, count, total.facts["trailing"], (operation, total))
    return None


def sigmoid_of(operation: Operation) -> Operation | None:
    """Return x of 1 / (1 + exp(-x))."""
    if operation.op == "logistic":
        return operation.operands[0]
    if operation.op == "divide" and near(operation.operands[0].value, 1.0):
        return _one_plus_exp_minus(operation.operands[1])
    return None


def _one_plus_exp_minus(operation: Operation) -> Operation | None:
    if operation.op != "add" or not any(near(operand.value, 1.0) for operand in operation.operands):
        return None
    for exp in operation.operands:
        if exp.op == "exp" and exp.operands[0].op == "negate":
            return exp.operands[0].operands[0]
    return None


def silu_by_quotient(operation: Operation) -> Operation | None:
    """Return x of x / (1 + exp(-x))."""
    if operation.op == "divide" and _one_plus_exp_minus(operation.operands[1]) is operation.operands[0]:
        return operation.operands[0]
    return None


class Softmax(NamedTuple):
    """exp(x - max(x)) and its sum over `columns` values of x."""

    x: Operation
    maximum: Operation
    shifted: Operation
    exp: Operation
    total: Operation
    columns: int


def softmaxes(graph: OperationGraph) -> Iterator[Softmax]:
    """Find exp(x - max(x)) and the sum of it; a sum without subtracting the maximum is none."""
    for exp in graph.of("exp"):
        shifted = exp.operands[0]
        if shifted.op != "subtract":
            continue
        x, subtracted = shifted.operands
        maximum = _maximum_of(subtracted, x)
        guarded = [user for user in exp.users if user.op == "add" and any(_is_tiny(o) for o in user.operands)]
        sums = [user for summed in (exp, *guarded) for user in summed.users if user.op == "reduce-sum"]
        totals = [total for total in sums if total.elements == subtracted.elements]
        if maximum is not None and totals and exp.elements > totals[0].elements:
            yield Softmax(x, maximum, shifted, exp, totals[0], exp.elements // totals[0].elements)


def _maximum_of(operation: Operation, x: Operation) -> Operation | None:
    """Return the maximum of x behind what guards a row of only -inf: select(isfinite(m), m, 0), max(x, -1e38)."""
    for near_by in ancestors([operation], 8):
        if near_by.op == "reduce-max":
            taken = near_by.operands[0]
            if taken is x or (taken.op == "maximum" and x in taken.operands):
                return near_by
    return None


def _is_tiny(operation: Operation) -> bool:
    """Return whether a constant only keeps a sum of exponentials, of which the largest is 1, above 0."""
    return operation.value is not None and 0 < operation.value < 1e-6


def forward(operation: Operation) -> bool:
    """Return whether an operation runs outside the gradient."""
    return not operation.occurrences or bool(operation.phases() & {"forward", "recompute"})


def narrowest(*operations: Operation) -> str:
    """Return the dtype with the fewest bits among those in which values are kept: plain code computes in f32."""
    bits = {"bf16": 16, "f16": 16, "f32": 32, "f64": 64}
    kept = [dtype for operation in operations for _, dtype in operation.variants if dtype in bits]
    return min(kept, key=bits.__getitem__, default=operations[0].dtype)


def is_random(operation: Operation) -> bool:
    """Return whether a value is a dropout mask: a comparison with random bits of a generator, or of Threefry."""
    if operation.op not in ("compare", "random"):
        return False
    return any(o.op in ("random", "shift-right-logical") for o in ancestors([operation], 60))
