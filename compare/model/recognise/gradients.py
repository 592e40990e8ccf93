"""The gradient of a recognised block: operations of backward that use what the block computed or took."""

from __future__ import annotations

from dataclasses import replace

from .block import RecognisedBlock
from .operation_graph import Operation, ancestors
from .patterns import forward

_PRODUCTS = frozenset(("product", "ragged-product", "attention"))


def gradient_of(block: RecognisedBlock) -> RecognisedBlock | None:
    """Return the block's gradient, None where the program has none.

    It begins with the operations of backward that use a value inside the block, or an input that no other forward
    operation uses. Others follow whose operands all belong to the gradient, to the block or to its inputs, such as the
    products with an input that several blocks share. A library's attention has one operation as its gradient. A block
    without products, such as a rotation, has none in its gradient: they are the gradient of what takes its result.
    """
    inside = set(block.operations) - {block.result}
    own = {value for value in block.inputs if _is_exclusive(value, block)}
    if block.block == "embedding":
        seeds = [user for user in _users_of_ids(block.inputs[1]) if user.elements == block.inputs[0].elements]
    elif block.attributes.get("library"):
        seeds = [
            user for user in block.inputs[0].users
            if user.op == "attention" and user.facts["backward"] and set(block.inputs) <= set(user.operands)
        ]
        return _block(block, seeds)
    else:
        seeds = [user for value in (*inside, *own) for user in value.users if _is_backward(user)]
        if block.attributes.get("without_last_product"):  # that of the result's gradient and the last weight
            elements = block.operations[0].elements
            seeds += [o for seed in seeds for o in seed.operands if o.op == "product" and o.elements == elements]
            seeds = [seed for seed in seeds if _is_backward(seed)]
    known = dict.fromkeys(sorted(seeds, key=lambda operation: operation.number))
    available = {*block.operations, *block.inputs}
    has_labels = block.block.endswith("cross_entropy")
    waiting = list(known)
    while waiting:
        for user in waiting.pop().users:
            if user not in known and _is_backward(user) and all(
                o in known or o in available or o.positional or (has_labels and _is_of_labels(o)) for o in user.operands
            ):
                known[user] = None
                waiting.append(user)
    has_products = any(operation.op in _PRODUCTS for operation in block.operations)
    return _block(block, [operation for operation in known if has_products or operation.op not in _PRODUCTS])


def _block(block: RecognisedBlock, operations: list[Operation]) -> RecognisedBlock | None:
    if not operations:
        return None
    ordered = tuple(sorted(operations, key=lambda operation: operation.number))
    return replace(block, phase="backward", operations=ordered)


def _users_of_ids(ids: Operation) -> list[Operation]:
    """Return the gradients that are scattered to the rows of these ids, which jax clamps and PyTorch compares."""
    waiting = [source for source in ancestors([ids], 10) if not source.operands or source is ids]
    found: dict[Operation, None] = {}
    seen = set(waiting)
    while waiting:
        for user in waiting.pop().users:
            if user.op == "scatter" and _is_backward(user):
                found[user] = None
            elif user not in seen and user.elements <= 2 * ids.elements and user.dtype.startswith(("s", "u", "p")):
                seen.add(user)
                waiting.append(user)
    return list(found)


def _is_of_labels(operation: Operation) -> bool:
    """Return whether a value is computed from integers and scalars alone: labels, their one-hots, the mean's scale."""
    leaves = [o for o in ancestors([operation], 60) if not o.operands]
    return all(o.positional or o.dtype.startswith(("s", "u", "p")) or o.elements == 1 for o in leaves)


def _is_backward(operation: Operation) -> bool:
    return operation.phases() == {"backward"}


def _is_exclusive(value: Operation, block: RecognisedBlock) -> bool:
    return all(user in block.operations for user in value.users if user.occurrences and forward(user))
