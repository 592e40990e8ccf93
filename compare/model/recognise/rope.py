"""Rotary position embeddings of queries and keys."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from .block import RecognisedBlock, own_phase
from .operation_graph import Operation, OperationGraph, ancestors
from .patterns import forward, narrowest


class Rotation(NamedTuple):
    """out = [x1 cos - x2 sin, x2 cos + x1 sin] of the halves, or of the even and odd elements, of x."""

    x: Operation
    cos: Operation
    sin: Operation
    out: Operation
    operations: tuple[Operation, ...]


def rotations(graph: OperationGraph) -> Iterator[Rotation]:
    """Find rotations written by halves, and as x cos + [-x2, x1] sin."""
    for operation in graph.of("add"):
        if forward(operation):
            found = _whole(operation) or _halves(operation)
            if found is not None and _turns(found):
                yield found


def _turns(rotation: Rotation) -> bool:
    """Return whether the factors are a cosine and a sine, or both are data: tables that were computed earlier."""
    words = [{o.op for o in ancestors([factor], 12)} for factor in (rotation.cos, rotation.sin)]
    if "cos" in words[0] or "sin" in words[1]:
        return "cos" in words[0] and "sin" in words[1]
    smaller = max(rotation.cos.elements, rotation.sin.elements) < rotation.x.elements
    return smaller and all("input" in found and "product" not in found for found in words)


def _pairs(operation: Operation) -> Iterator[tuple[Operation, Operation]]:
    if operation.op == "multiply":
        yield operation.operands[0], operation.operands[1]
        yield operation.operands[1], operation.operands[0]


def _whole(operation: Operation) -> Rotation | None:
    for first, second in (operation.operands, operation.operands[::-1]):
        for turned, sin in _pairs(second):
            x = _turned(turned)
            if x is None:
                continue
            for straight, cos in _pairs(first):
                if straight is x:
                    return Rotation(x, cos, sin, operation, (turned, first, second, operation))
    return None


def _turned(operation: Operation) -> Operation | None:
    """Return x of [-x2, x1]."""
    if operation.op != "concatenate" or len(operation.operands) != 2 or operation.operands[0].op != "negate":
        return None
    second, first = operation.operands[0].operands[0], operation.operands[1]
    if first.op == second.op == "slice" and first.operands[0] is second.operands[0] and first is not second:
        return first.operands[0]
    return None


def _halves(plus: Operation) -> Rotation | None:
    """Recognise x2 cos + x1 sin, where x1 cos - x2 sin is computed, too."""
    for one, other in (plus.operands, plus.operands[::-1]):
        for x2, cos in _pairs(one):
            for x1, sin in _pairs(other):
                if not (x1.op == x2.op == "slice" and x1 is not x2 and x1.operands[0] is x2.operands[0]):
                    continue
                for product in x1.users:
                    if product.op == "multiply" and cos in product.operands:
                        for minus in product.users:
                            if minus.op == "subtract" and minus.operands[0] is product and any(
                                pair == (x2, sin) for pair in _pairs(minus.operands[1])
                            ):
                                joined = [u for u in plus.users if u.op == "concatenate" and minus in u.operands]
                                out = joined[0] if joined else plus
                                operations = (product, minus.operands[1], minus, one, other, plus, out)
                                return Rotation(x1.operands[0], cos, sin, out, tuple(dict.fromkeys(operations)))
    return None


def ropes(graph: OperationGraph, attentions: list[RecognisedBlock]) -> Iterator[RecognisedBlock]:
    """Return a block for each attention whose queries or keys are rotated, with its sizes, and for rotations alone."""
    found = list(rotations(graph))
    by_result = {rotation.out: rotation for rotation in found}
    used: set[Operation] = set()
    for attention in attentions:
        turned = [by_result[o] for o in ancestors(attention.inputs[:2], 12) if o in by_result]
        own = [rotation for rotation in turned if rotation.out not in used]
        if own:
            used.update(rotation.out for rotation in own)
            sizes = {a: attention.sizes[a] for a in ("batch", "heads", "kv_heads", "sequence", "head_dim")}
            yield _block(own, sizes)
    for rotation in found:
        if rotation.out not in used and (sizes := _own_sizes(rotation)):
            yield _block([rotation], sizes)


def _own_sizes(rotation: Rotation) -> dict[str, int]:
    """Return the sizes of a rotation alone, of [batch, sequence, heads, head_dim] or with exchanged middle axes.

    The angles, one for each position and pair, tell which axis is the sequence; {} where both axes would fit.
    """
    for batch, first, second, head_dim in rotation.x.in_shape(4):
        rows = {2 * rotation.cos.elements // head_dim, rotation.cos.elements // head_dim}
        fits = [rows & {sequence, batch * sequence} for sequence in (first, second)]
        if bool(fits[0]) != bool(fits[1]):
            sequence, heads = (first, second) if fits[0] else (second, first)
            return {"batch": batch, "heads": heads, "sequence": sequence, "head_dim": head_dim}
    return {}


def _block(rotations: list[Rotation], sizes: dict[str, int]) -> RecognisedBlock:
    operations = dict.fromkeys(operation for rotation in rotations for operation in rotation.operations)
    inputs = dict.fromkeys(value for r in rotations for value in (r.x, r.cos, r.sin))
    last = rotations[-1].out
    dtype = narrowest(*(rotation.out for rotation in rotations))
    return RecognisedBlock("rope", sizes, dtype, own_phase(last), tuple(operations), tuple(inputs), last)
