"""RMSNorm, LayerNorm, and LayerNorm of a sum with dropout."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .block import RecognisedBlock, own_phase
from .operation_graph import Operation, OperationGraph
from .patterns import Mean, forward, is_random, mean_of, narrowest, near, square_of


@dataclass(frozen=True)
class Statistic:
    """The mean by whose root a norm divides. centred: of x - mean(x)."""

    x: Operation
    centred: bool
    count: int
    trailing: bool
    operations: tuple[Operation, ...]


def norms(graph: OperationGraph) -> Iterator[RecognisedBlock]:
    """Find y = x / sqrt(mean(x^2) + eps) [* weight], and the same of x - mean(x) [+ bias].

    The means are over the last axis [rows, columns], or over as many values as the weight has.
    """
    for root in graph.of("rsqrt", "sqrt", "power"):
        if root.op == "power" and not near(root.operands[1].value, -0.5):
            continue
        statistic = _statistic(root.operands[0])
        if statistic is None or statistic.count < 2 or not forward(root):
            continue
        scaled = _scaled(root, statistic)
        if scaled is None:
            continue
        steps, weight, bias = scaled
        if not statistic.trailing and (weight is None or weight.elements != statistic.count):
            continue
        x = statistic.x
        sizes = {"rows": x.elements // statistic.count, "columns": statistic.count}
        attributes = {} if weight is not None else {"weight": False}
        if statistic.centred and bias is None:
            attributes["bias"] = False
        block = "layernorm" if statistic.centred else "rmsnorm"
        operations = (*statistic.operations, root, *steps)
        if statistic.centred and (dropped := _dropout_and_sum(x)):
            block = "dropout_residual_norm"
            operations = (*dropped, *operations)
        inputs = tuple(value for value in (x, weight, bias) if value is not None)
        yield RecognisedBlock(
            block, sizes, narrowest(x, steps[-1]), own_phase(root), tuple(dict.fromkeys(operations)), inputs, steps[-1],
            attributes,
        )


def _statistic(operation: Operation) -> Statistic | None:
    """Recognise mean(x^2) + eps, mean((x - mean(x))^2) + eps and mean(x^2) - mean(x)^2 + eps."""
    steps = [operation]
    while operation.op in ("add", "maximum"):
        rest = [operand for operand in operation.operands if operand.elements > 1 or operand.op != "constant"]
        if len(rest) != 1:
            return None
        operation = rest[0]
        steps.append(operation)
    if operation.op == "variance":
        x = operation.operands[0]
        count = x.elements // max(operation.elements, 1)
        return Statistic(x, True, count, operation.facts["trailing"], tuple(steps))
    if operation.op == "subtract":
        return _one_pass(operation, steps)
    mean = mean_of(operation)
    squared = None if mean is None else square_of(mean.of)
    if mean is None or squared is None:
        return None
    operations = (*steps, *mean.operations, mean.of)
    inner = _centred(squared, mean)
    if inner is not None:
        return Statistic(inner.of, True, mean.count, mean.trailing, (*operations, squared, *inner.operations))
    return Statistic(squared, False, mean.count, mean.trailing, operations)


def _one_pass(operation: Operation, steps: list[Operation]) -> Statistic | None:
    squares, of_mean = mean_of(operation.operands[0]), square_of(operation.operands[1])
    mean = None if of_mean is None else mean_of(of_mean)
    if squares is None or mean is None or square_of(squares.of) is not mean.of:
        return None
    operations = (*steps, *squares.operations, squares.of, operation.operands[1], *mean.operations)
    return Statistic(mean.of, True, squares.count, squares.trailing, operations)


def _centred(operation: Operation, mean: Mean) -> Mean | None:
    """Return the mean m of x - m, where it is the mean of x over as many values."""
    if operation.op != "subtract":
        return None
    inner = mean_of(operation.operands[1])
    return inner if inner is not None and inner.of is operation.operands[0] and inner.count == mean.count else None


def _scaled(
    root: Operation, statistic: Statistic
) -> tuple[list[Operation], Operation | None, Operation | None] | None:
    """Return the steps that divide x by the root and scale it, the weight and the bias."""
    wanted = {statistic.x, *_differences(statistic)} if not statistic.centred else _differences(statistic)
    steps: list[Operation] = []
    weight = bias = None
    divided = False
    current = root
    for _ in range(5):
        following = None
        for user in current.users:
            if not forward(user) or len(user.operands) != 2:
                continue
            other = user.operands[0] if user.operands[1] is current else user.operands[1]
            if user.op == "multiply" or (user.op == "divide" and root.op == "sqrt" and user.operands[1] is current):
                if not divided and (other in wanted or _weighted(other, wanted, statistic.count)):
                    following, divided = user, True
                    weight = weight or _weighted(other, wanted, statistic.count)
                    break
                if user.op == "multiply" and weight is None and other.elements == statistic.count:
                    following, weight = user, other
                    break
                if user.op == "multiply" and divided and 1 < other.elements < statistic.x.elements:
                    return None  # a scale of other groups than those whose mean was taken
                if near(user.operands[0].value, 1.0) and not divided:  # 1 / sqrt(...)
                    following = user
                    break
            if user.op == "add" and divided and bias is None and other.elements == statistic.count:
                following, bias = user, other
                break
        if following is None:
            break
        steps.append(following)
        current = following
    return (steps, weight, bias) if divided else None


def _weighted(operation: Operation, wanted: set[Operation], columns: int) -> Operation | None:
    """Return w of x * w."""
    if operation.op != "multiply" or not wanted.intersection(operation.operands):
        return None
    return next((operand for operand in operation.operands if operand.elements == columns), None)


def _differences(statistic: Statistic) -> set[Operation]:
    return {
        user for user in statistic.x.users
        if user.op == "subtract" and user.operands[0] is statistic.x and _is_mean(user.operands[1], statistic.x)
    }


def _is_mean(operation: Operation, x: Operation) -> bool:
    mean = mean_of(operation)
    return mean is not None and mean.of is x


def _dropout_and_sum(x: Operation) -> list[Operation] | None:
    """Recognise x = residual + dropout(v): v is kept where random bits say so, and scaled."""
    if x.op != "add":
        return None
    for operand in x.operands:
        chosen = [operand, *(operand.operands if operand.op in ("multiply", "divide") else ())]
        for kept in chosen:
            if kept.op in ("select", "multiply") and any(is_random(value) for value in kept.operands):
                return list(dict.fromkeys((kept, operand, x)))
    return None
