"""Updates of parameters by Adam and AdamW."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from .block import RecognisedBlock
from .operation_graph import Operation, OperationGraph
from .patterns import factors


class _Update(NamedTuple):
    gradient: Operation
    mean: Operation
    variance: Operation
    operations: tuple[Operation, ...]
    step: Operation


def updates(graph: OperationGraph) -> Iterator[RecognisedBlock]:
    """Find mu' / (sqrt(nu') + eps) with mu' = b1 mu + (1 - b1) g and nu' = b2 nu + (1 - b2) g^2, up to scalar factors.

    All parameters of a program are one block, as one call of an optimizer updates them all.
    """
    found = [update for root in graph.of("sqrt") if (update := _update(root)) is not None]
    if not found:
        return
    operations = tuple(dict.fromkeys(operation for update in found for operation in update.operations))
    inputs = dict.fromkeys(value for update in found for value in (update.gradient, update.mean, update.variance))
    elements = sum(update.step.elements for update in found)
    yield RecognisedBlock(
        "adamw", {"elements": elements}, found[0].step.dtype, "update", operations, tuple(inputs), found[-1].step,
        {"tensors": len(found)},
    )


def _update(root: Operation) -> _Update | None:
    if root.elements == 1:
        return None
    variance = _unscaled(root.operands[0])
    moment = _second_moment(variance)
    if moment is None:
        return None
    old_variance, gradient = moment
    divisors = [root, *(user for user in root.users if user.op == "add")]
    divisors += [user for divisor in divisors for user in divisor.users if _unscaled(user) is divisor]
    for shifted in dict.fromkeys(divisors):
        for step in shifted.users:
            if step.op == "divide" and step.operands[1] is shifted or step.op == "multiply":
                for operand in step.operands:
                    mean = _unscaled(operand)
                    old_mean = _first_moment(mean, gradient)
                    if old_mean is not None and old_mean is not old_variance:
                        operations = (variance, root, shifted, mean, step)
                        return _Update(gradient, old_mean, old_variance, tuple(dict.fromkeys(operations)), step)
    return None


def _unscaled(operation: Operation) -> Operation:
    """Return x of c x and x / c for scalars c: bias corrections, the rate."""
    for _ in range(6):
        if operation.op not in ("multiply", "divide"):
            break
        large = [operand for operand in operation.operands if operand.elements > 1]
        if len(large) != 1 or large[0] is not operation.operands[0] and operation.op == "divide":
            break
        operation = large[0]
    return operation


def _second_moment(operation: Operation) -> tuple[Operation, Operation] | None:
    """Return (v, g) of b v + (1 - b) g^2; the moment v is an input of the program."""
    if operation.op != "add":
        return None
    for old, new in (operation.operands, operation.operands[::-1]):
        moment = _unscaled(old)
        parts = [factor for factor in factors(new) if factor.elements > 1]
        if moment.op not in ("input", "slice"):
            continue
        if len(parts) == 1 and parts[0].op in ("square", "power"):
            return moment, _unscaled(parts[0].operands[0])
        if len(parts) == 2 and _unscaled(parts[0]) is _unscaled(parts[1]):
            return moment, _unscaled(parts[0])
    return None


def _first_moment(operation: Operation, gradient: Operation) -> Operation | None:
    """Return m of b m + (1 - b) g or m + (1 - b) (g - m), for this gradient g."""
    if operation.op != "add":
        return None
    for old, new in (operation.operands, operation.operands[::-1]):
        moment, rest = _unscaled(old), _unscaled(new)
        if rest.op == "subtract" and moment in rest.operands:
            rest = _unscaled(rest.operands[0])
        if moment.op in ("input", "slice") and rest is gradient and moment is not gradient:
            return moment
    return None
