"""Gated and plain feed-forward layers, and mixtures of experts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from .block import RecognisedBlock, own_phase
from .operation_graph import Operation, OperationGraph, ancestors
from .patterns import factors, forward, is_random, product_behind, sigmoid_of, silu_by_quotient, without_constants


class Activation(NamedTuple):
    """name: "silu", "gelu" (tanh), "gelu_erf" or "relu". rest: what the activation of `x` is multiplied by."""

    name: str
    x: Operation
    rest: tuple[Operation, ...]
    operations: tuple[Operation, ...]


class FeedForward(NamedTuple):
    """products: those of the activation's operand and, if gated, of the other factor.

    down: the product that takes the result. Where backward computes the others again, that is the one of the last
    weight's gradient, and `again` is true.
    """

    activation: Activation
    products: tuple[Operation, ...]
    down: Operation
    gated: bool
    again: bool


def feed_forwards(graph: OperationGraph) -> Iterator[FeedForward]:
    """Find act(h Wg) * (h Wu), or act(h W + b), where it enters a product with the last weight."""
    for down in (*graph.of("product"), *graph.of("ragged-product")):
        for operand in map(_kept, down.operands[:2]):
            activation = activation_of(operand)
            if activation is None:
                continue
            again = not forward(down)
            if again and (operand.phases() != {"recompute"} or any(forward(user) for user in operand.users)):
                continue
            sources = [activation.x, *(value for value in activation.rest if _is_large(value, operand))]
            products = [_product(source) for source in sources]
            known = [product for product in products if product is not None]
            if len(sources) <= 2 and len(known) == len(sources) and all(forward(product) for product in known):
                yield FeedForward(activation, tuple(dict.fromkeys(known)), down, len(sources) == 2, again)
                break


def _kept(operation: Operation) -> Operation:
    """Return x of select(p, x, 0): XLA writes a ragged product as one of rows that belong to an expert."""
    if operation.op == "select" and operation.operands[2].value == 0:
        return operation.operands[1]
    return operation


def _product(operation: Operation) -> Operation | None:
    if operation.op == "ragged-product":
        return operation
    return product_behind(operation)


def _is_large(value: Operation, whole: Operation) -> bool:
    """Return whether a factor has a value for each hidden unit; a router's weight has one for each token."""
    return value.elements == whole.elements


def activation_of(operation: Operation) -> Activation | None:
    """Recognise silu(x), gelu(x) or relu(x), and the factors beside it."""
    if (x := silu_by_quotient(operation)) is not None:
        return Activation("silu", x, (), (operation,))
    parts = factors(operation)
    for part in parts:
        rest = [other for other in parts if other is not part]
        if (x := silu_by_quotient(part)) is not None:
            return Activation("silu", x, _full(rest), (operation, part))
        if (x := sigmoid_of(part)) is not None and x in rest:
            return Activation("silu", x, _without(rest, x), (operation, part))
        if part.op in ("gelu", "relu", "silu"):
            return Activation(part.op, part.operands[0], _full(rest), (operation, part))
        if part.op == "maximum" and part.operands[1].value == 0:
            return Activation("relu", part.operands[0], _full(rest), (operation, part))
        curve = without_constants(part)
        if curve.op in ("tanh", "erf") and curve is not part:
            argument = without_constants(curve.operands[0])
            for x in rest:
                if argument is x:
                    name = "silu" if curve.op == "tanh" else "gelu_erf"
                    return Activation(name, x, _without(rest, x), (operation, part, curve))
                if curve.op == "tanh" and x.op != "constant" and x in set(ancestors([argument], 16)):
                    return Activation("gelu", x, _without(rest, x), (operation, part, curve))
    return None


def _full(values: list[Operation]) -> tuple[Operation, ...]:
    """Return the values that are neither constants nor a dropout's mask."""
    return tuple(value for value in values if value.op != "constant" and not is_random(value))


def _without(values: list[Operation], x: Operation) -> tuple[Operation, ...]:
    kept = list(values)
    kept.remove(x)
    return _full(kept)


def mlps(graph: OperationGraph) -> Iterator[RecognisedBlock]:
    """Find down(act(h Wg) * (h Wu)) and down(gelu(h W + b)), with one weight for all tokens.

    The suite has the whole of it for SiLU alone. Of GELU it has the gate without products, or the first product with
    its epilogue; the block has the operations of these.
    """
    for found in feed_forwards(graph):
        down, products = found.down, found.products
        if any(product.op != "product" or product.facts["batch"] != 1 for product in (*products, down)):
            continue
        width, activated = products[0].facts["k"], found.activation.operations[0]
        summed = down.facts["k"]
        others = activated.elements // summed
        if summed * others != activated.elements or others not in (down.facts["m"], down.facts["n"]):
            continue
        tokens, hidden = (summed, others) if found.again else (others, summed)
        name = found.activation.name
        attributes: dict[str, object] = {}
        if found.gated and name == "silu":
            block, sizes = "swiglu_mlp", {"tokens": tokens, "width": width, "hidden": hidden}
        elif found.gated and name.startswith("gelu"):
            block, sizes = "geglu", {"rows": tokens, "columns": hidden}
            attributes["width"] = width
        elif not found.gated and name.startswith("gelu"):
            block, sizes = "linear_gelu", {"m": tokens, "k": width, "n": hidden}
        else:
            continue
        if name == "gelu_erf":
            attributes["activation"] = name
        is_whole = block == "swiglu_mlp"
        if found.again and is_whole:
            attributes["without_last_product"] = True
        elif not found.again and not is_whole:
            attributes["down"] = down.elements // tokens
        between = _between(found)
        last = down if is_whole and not found.again else activated
        first = () if block == "geglu" else products
        operations = tuple(dict.fromkeys((*first, *between, last)))
        takers = (*first, last) if first else operations
        inputs = tuple(dict.fromkeys(operand for taker in takers for operand in taker.operands))
        yield RecognisedBlock(
            block, sizes, products[0].given[0][1], own_phase(last), operations,
            tuple(value for value in inputs if value not in operations and value.op != "constant"),
            down if is_whole else activated, attributes,
        )


def _between(found: FeedForward) -> list[Operation]:
    """Return the operations between the products, nearest to the last one first."""
    stop = set(found.products)
    kept: list[Operation] = []
    waiting = [found.activation.operations[0]]
    seen = set(waiting)
    while waiting and len(kept) < 40:
        operation = waiting.pop(0)
        if operation in stop or operation.op in ("constant", "input", "product", "ragged-product", "iota"):
            continue
        kept.append(operation)
        for operand in operation.operands:
            if operand not in seen:
                seen.add(operand)
                waiting.append(operand)
    return kept


class Router(NamedTuple):
    """The choice of `top_k` of `experts` for each of `tokens`, from the product `logits`."""

    choice: Operation
    logits: Operation
    tokens: int
    experts: int
    top_k: int


def routers(graph: OperationGraph) -> Iterator[Router]:
    """Find the choice of the largest of a product's results along the last axis."""
    for choice in graph.of("topk", "sort"):
        scores = next((operand for operand in choice.operands if not operand.positional), None)
        if scores is None or not choice.given and not choice.operands:
            continue
        experts = scores.shape[-1] if scores.shape else 1
        tokens = scores.elements // max(experts, 1)
        logits = [o for o in ancestors([scores], 20) if o.op == "product" and o.elements == tokens * experts]
        kept = {user.elements // tokens for user in choice.users if user.op == "slice"}
        top_k = choice.elements // tokens if choice.op == "topk" else min(kept, default=0)
        if logits and 0 < top_k < experts:
            yield Router(choice, logits[0], tokens, experts, top_k)


def mixtures(graph: OperationGraph) -> Iterator[RecognisedBlock]:
    """Find gated experts: products with weights [experts, width, hidden], and a router that chooses among as many.

    The products may be of all tokens with all experts (dense), of tokens in groups (one-hot dispatch, batched), or
    ragged.
    """
    chosen = list(routers(graph))
    seen: set[Operation] = set()
    for found in feed_forwards(graph):
        activated = found.activation.operations[0]
        if not found.gated or found.activation.name != "silu" or found.again or activated in seen:
            continue
        for router in chosen:
            width = router.logits.facts["k"]
            weights = [_weight(product, router.experts) for product in (*found.products, found.down)]
            known = [weight for weight in weights if weight is not None]
            if len(known) < len(weights) or not _has_experts(known[-1], router.experts):
                continue
            each = known[-1].elements
            hidden = each // (router.experts * width)
            if hidden * router.experts * width != each or any(weight.elements % each for weight in known):
                continue
            seen.add(activated)
            ragged = found.down.op == "ragged-product" or activated not in found.down.operands
            dense = activated.elements == router.tokens * router.experts * hidden
            sizes = {
                "tokens": router.tokens, "width": width, "hidden": hidden, "experts": router.experts,
                "top_k": router.top_k,
            }
            operations = (router.choice, *found.products, *_between(found), found.down)
            inputs = dict.fromkeys(o for product in (*found.products, found.down) for o in product.operands)
            form = "ragged" if ragged else "dense" if dense else "dispatched"
            yield RecognisedBlock(
                "moe", sizes, found.down.given[0][1], own_phase(found.down), tuple(dict.fromkeys(operations)),
                tuple(value for value in inputs if value not in operations), found.down, {"form": form},
            )
            break


def _weight(product: Operation, experts: int) -> Operation | None:
    """Return the operand of a product that is a parameter for each expert, or two of them side by side."""
    weights = [operand for operand in product.operands[:2] if _is_weight(operand)]
    return next((w for w in weights if w.op != "input" or _has_experts(w, experts)), None)


def _is_weight(operation: Operation) -> bool:
    if operation.op in ("slice", "concatenate"):
        return all(_is_weight(operand) or operand.positional for operand in operation.operands)
    return operation.op == "input"


def _has_experts(weight: Operation, experts: int) -> bool:
    """Return whether a weight is [experts, rows, columns]."""
    return any(shape[0] == experts for shape in weight.in_shape(3))
