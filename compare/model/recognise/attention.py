"""Attention, written out as two products around a softmax, or a library's call."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from .block import RecognisedBlock, own_phase
from .masks import HIDDEN, Mask, visibility
from .operation_graph import Operation, OperationGraph
from .patterns import Softmax, forward, is_random, quotient, softmaxes

_FEW_STEPS = 6  # between a softmax and the product with the values: normalisation, dropout


@dataclass
class Scores:
    """The scores q k^T, and what is done to them before the softmax, from there to the product."""

    product: Operation
    steps: list[Operation] = field(default_factory=list)
    masks: list[Mask] = field(default_factory=list)
    biases: list[Operation] = field(default_factory=list)
    capped: bool = False


def attentions(graph: OperationGraph) -> Iterator[RecognisedBlock]:
    """Find out = softmax(masked(cap(scale q k^T) + bias)) v.

    q k^T [batch, heads, queries, keys] sums over head_dim, the second product over the keys. The softmax is over the
    keys; its division may follow the second product. A backward pass that computes the probabilities again has, in the
    place of the second product, that of the values' gradient, which sums over the queries.
    """
    for softmax in softmaxes(graph):
        scores = scores_behind(softmax.x)
        weighted = None if scores is None else _weighted_sum(softmax, again=False) or _weighted_sum(softmax, again=True)
        if scores is not None and weighted is not None:
            found = _block(softmax, scores, *weighted)
            if found is not None:
                yield found
    for call in graph.of("attention"):
        if not call.facts["backward"] and (found := _library(call)) is not None:
            yield found


def scores_behind(operation: Operation, depth: int = 12) -> Scores | None:
    """Follow scores back to the product q k^T through scale, cap, bias and mask."""
    if operation.op == "product":
        return Scores(operation)
    if depth == 0:
        return None
    for position, operand in enumerate(operation.operands):
        if operand.elements != operation.elements or operand.positional:
            continue
        others = [other for index, other in enumerate(operation.operands) if index != position]
        if not _may_precede_softmax(operation, others):
            continue
        found = scores_behind(operand, depth - 1)
        if found is None:
            continue
        found.steps.append(operation)
        found.capped |= operation.op == "tanh"
        if operation.op == "select":
            hidden = others[1].value
            if hidden is None or hidden <= HIDDEN:
                found.masks.append(Mask(others[0], hides=position == 2))
        elif operation.op in ("add", "subtract") and others[0].op != "constant":
            mask = _added_mask(others[0])
            if mask is not None:
                found.masks.append(mask)
            else:
                found.biases.append(others[0])
        return found
    return None


def _added_mask(operation: Operation) -> Mask | None:
    """Return the mask of an added array of positions alone, or of select(p, 0, -inf)."""
    if operation.positional:
        return Mask(operation, hides=None)
    branches = [operand.value for operand in operation.operands[1:] if operand.value is not None]
    if operation.op == "select" and len(branches) == 2 and 0 in branches and min(branches) <= HIDDEN:
        return Mask(operation.operands[0], hides=branches[1] == 0)
    return None


def _may_precede_softmax(operation: Operation, others: list[Operation]) -> bool:
    if operation.op in ("multiply", "divide"):
        return others[0].elements == 1
    return operation.op in ("add", "subtract", "select", "tanh", "maximum", "clamp")


def _weighted_sum(softmax: Softmax, *, again: bool) -> tuple[Operation, Operation, list[Operation]] | None:
    """Return the product of the probabilities and the values, the values, and the steps before it.

    again: that of the probabilities and the result's cotangent, which backward computes.
    """
    waiting: list[tuple[Operation, list[Operation]]] = [(softmax.exp, [])]
    seen = {softmax.exp}
    while waiting:
        operation, steps = waiting.pop(0)
        for user in operation.users:
            if user.op == "product" and forward(user) is not again:
                values = [operand for operand in user.operands if operand is not operation]
                summed = user.facts["k"]
                if len(values) == 1 and (summed == softmax.columns or (again and softmax.exp.elements % summed == 0)):
                    return user, values[0], steps
            elif user.op in ("multiply", "divide", "select") and len(steps) < _FEW_STEPS and user not in seen:
                if forward(user) and user.elements == softmax.exp.elements:
                    seen.add(user)
                    waiting.append((user, [*steps, user]))
    return None


def _block(
    softmax: Softmax, scores: Scores, out: Operation, values: Operation, steps: list[Operation]
) -> RecognisedBlock | None:
    product = scores.product
    axes = _axes(softmax, scores)
    if axes is None or product.facts["k"] == 1:
        return None
    batch, heads, queries = axes
    # Every sequence has its own keys; the softmax of a router or of a learnt memory multiplies by one weight for all.
    if product.facts["batch"] % batch or product.facts["batch"] != out.facts["batch"]:
        return None
    if batch == 1 and product.facts["batch"] != heads:
        return None
    keys, head_dim = softmax.columns, product.facts["k"]
    again = not forward(out)
    value_dim = values.elements // (batch * heads * queries) if again else out.elements // (batch * heads * queries)
    taken = min(product.operands, key=lambda operand: operand.elements) if again else values
    kv_heads = taken.elements // max(batch * keys * (head_dim if again else value_dim), 1)
    if kv_heads < 1 or heads % kv_heads:
        kv_heads = heads
    biases = [bias for bias in scores.biases if _is_for_each_head(bias, batch, heads, queries * keys)]
    data = [bias for bias in scores.biases if bias not in biases]
    seen = visibility(scores.masks, queries, keys, data=bool(data))
    sizes = {"batch": batch, "heads": heads, "kv_heads": kv_heads, "sequence": queries, "head_dim": head_dim}
    attributes: dict[str, object] = {}
    if seen.data:
        attributes["mask"] = "data"
    if seen.causal is not None:
        sizes |= {"causal": int(seen.causal)} | ({} if seen.data and not seen.window else {"window": seen.window})
    if biases:
        sizes, others = _with_bias(sizes)
        attributes |= others
    if scores.capped:
        attributes["capped"] = True
    if any(is_random(operand) for step in steps for operand in step.operands):
        attributes["dropout"] = True
    if keys != queries:
        attributes["keys"] = keys
    if value_dim != head_dim:
        attributes["value_dim"] = value_dim
    if again:
        attributes["without_last_product"] = True
    divided = [user for user in out.users if (parts := quotient(user)) and parts[1] is softmax.total]
    inside = (
        product, *scores.steps, softmax.maximum, softmax.shifted, softmax.exp, softmax.total, *steps,
        *([] if again else [out, *divided]),
    )
    return RecognisedBlock(
        "attention_bias" if biases else "attention", sizes, product.given[0][1], own_phase(softmax.exp),
        tuple(dict.fromkeys(inside)), product.operands if again else (*product.operands, values),
        (divided or [out])[-1], attributes,
    )


def _is_for_each_head(bias: Operation, batch: int, heads: int, pairs: int) -> bool:
    """Return whether an added array has a value for each head; one of [batch, 1, queries, keys] is a mask."""
    if len(bias.shape) == 4 and bias.shape[1] == 1 < heads:
        return False
    return bias.elements in (heads * pairs, batch * heads * pairs)


def _with_bias(sizes: dict[str, int]) -> tuple[dict[str, int], dict[str, int]]:
    """Return the sizes of block `attention_bias`, and as attributes what it does not have: groups of heads, a mask."""
    own = {axis: sizes[axis] for axis in ("batch", "heads", "sequence", "head_dim")}
    grouped = {"kv_heads": sizes["kv_heads"]} if sizes["kv_heads"] != sizes["heads"] else {}
    return own, grouped | {name: sizes[name] for name in ("causal", "window") if sizes.get(name)}


def _axes(softmax: Softmax, scores: Scores) -> tuple[int, int, int] | None:
    """Return (batch, heads, queries) from the shapes in which the scores appear.

    These are [batch, heads, queries, keys], with two axes for the heads in groups, or [heads, queries, keys]. Queries
    are as many as keys, or else the axis before the keys; some models keep [batch, queries, heads, keys], which the
    product's sizes tell.
    """
    keys = softmax.columns
    shapes = [
        shape for operation in (softmax.exp, softmax.x, scores.product, *scores.steps)
        for shape, _ in operation.variants if 3 <= len(shape) <= 5 and shape[-1] == keys
    ]
    if not shapes:
        return None
    shape = min(shapes, key=lambda shape: abs(len(shape) - 4))
    if len(shape) == 3:
        return 1, shape[0], shape[1]
    facts, axis = scores.product.facts, len(shape) - 2
    as_keys = [index for index in range(1, len(shape) - 1) if shape[index] == keys]
    sides = {facts["m"], facts["n"]}
    if as_keys:
        axis = as_keys[-1]
    elif len(shape) == 4 and shape[2] not in sides and shape[1] in sides:
        axis = 1
    return shape[0], math.prod(shape[1:-1]) // shape[axis], shape[axis]


def _library(call: Operation) -> RecognisedBlock | None:
    """Read a library's call, which says its shapes and its mask."""
    facts, given = call.facts, call.given
    (q, dtype), (k, _) = given[0], given[1]
    scores = facts.get("scores") or q
    if not (len(q) == len(k) == len(scores) == 4 and math.prod(q) > 0 and 0 < math.prod(scores[:3]) <= math.prod(q)):
        return None
    if facts.get("scores"):  # cuDNN in XLA: [batch, heads, queries, keys]
        batch, heads, queries, keys = facts["scores"]
        head_dim = math.prod(q) // (batch * heads * queries)
    else:  # PyTorch: [batch, heads, sequence, head_dim]
        batch, heads, queries, head_dim = q
        keys = k[2]
    kv_heads = min(call.operands[1].elements // (batch * keys * head_dim), heads)  # without copies for each query head
    sizes = {"batch": batch, "heads": heads, "kv_heads": kv_heads, "sequence": queries, "head_dim": head_dim}
    attributes: dict[str, object] = {"library": True}
    if facts["mask"] in ("CAUSAL", "NO_MASK", ""):
        window = facts["window"] if facts["mask"] == "CAUSAL" else 0
        sizes |= {"causal": int(facts["mask"] == "CAUSAL"), "window": window}
    else:
        attributes["mask"] = "data"
    if facts["bias"]:
        sizes, others = _with_bias(sizes)
        attributes |= others
    if keys != queries:
        attributes["keys"] = keys
    block = "attention_bias" if facts["bias"] else "attention"
    return RecognisedBlock(block, sizes, dtype, own_phase(call), (call,), call.operands, call, attributes)
