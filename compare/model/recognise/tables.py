"""Lookups of embeddings, and the cross-entropy over a vocabulary."""

from __future__ import annotations

from collections.abc import Iterator

from .block import RecognisedBlock, own_phase
from .operation_graph import Operation, OperationGraph, ancestors
from .patterns import Softmax, forward, narrowest, product_behind, softmaxes, without_constants


def embeddings(graph: OperationGraph) -> Iterator[RecognisedBlock]:
    """Find y[t] = table[ids[t]]: whole rows of a parameter [rows, columns], looked up by integers."""
    for gather in graph.of("gather"):
        table, ids = gather.operands[:2]
        shapes = table.in_shape(2)
        if table.op != "input" or not shapes or not forward(gather) or not gather.given[1][1].startswith(("s", "u")):
            continue
        rows, columns = shapes[0]
        tokens = gather.elements // columns
        if columns < 2 or rows < 2 or tokens * columns != gather.elements or ids.elements % max(tokens, 1):
            continue
        if table.dtype.startswith(("s", "u", "p")) or not _is_of_integers(ids):
            continue
        yield RecognisedBlock(
            "embedding", {"rows": rows, "columns": columns, "tokens": tokens}, gather.dtype, own_phase(gather),
            (gather,), (table, ids), gather,
        )


def _is_of_integers(operation: Operation) -> bool:
    """Return whether an index is computed from integers: ids. Those that a router chose are computed from scores."""
    leaves = [o for o in ancestors([operation], 100) if not o.operands]
    return all(o.positional or o.dtype.startswith(("s", "u", "p")) for o in leaves)


def cross_entropies(graph: OperationGraph) -> Iterator[RecognisedBlock]:
    """Find lse - logits[label] with lse = max + log(sum(exp(logits - max))), for tokens x classes.

    The label's logit is a gather, or a sum of the logits where an iota equals the label. Logits of a product are its
    `linear_cross_entropy`.
    """
    for softmax in softmaxes(graph):
        positive = [softmax.total, *(user for user in softmax.total.users if user.op == "abs")]  # optax's log(abs(sum))
        logs = [user for total in positive for user in total.users if user.op == "log" and forward(user)]
        if not logs:
            continue
        found = _picked(softmax, logs[0])
        if found is None:
            continue
        picked, labels = found
        tokens, classes = softmax.total.elements, softmax.columns
        logits = softmax.x
        inside = [logits] if logits.op != "input" else []
        projection = product_behind(_uncapped(logits))
        sizes = {"tokens": tokens, "classes": classes}
        block, inputs = "cross_entropy", [logits]
        if projection is not None and classes in (projection.facts["m"], projection.facts["n"]):
            block = "linear_cross_entropy"
            sizes = {"tokens": tokens, "width": projection.facts["k"], "classes": classes}
            inside, inputs = [projection, *inside], list(projection.operands)
        probabilities = _log_probabilities(softmax, logs[0])
        operations = (
            *inside, softmax.maximum, softmax.shifted, softmax.exp, softmax.total, logs[0], *probabilities, picked,
        )
        dtype = projection.given[0][1] if projection is not None else narrowest(logits)
        capped = any(o.op == "tanh" for o in ancestors([logits], 6)) and _uncapped(logits) is not logits
        yield RecognisedBlock(
            block, sizes, dtype, own_phase(softmax.total), tuple(dict.fromkeys(operations)), (*inputs, labels), picked,
            {"capped": True} if capped else {},
        )


def _uncapped(logits: Operation) -> Operation:
    """Return x of c tanh(x / c), or of a scaled x."""
    inner = without_constants(logits)
    return without_constants(inner.operands[0]) if inner.op == "tanh" else inner


def _log_probabilities(softmax: Softmax, log: Operation) -> list[Operation]:
    """Return logits - lse, also written as (logits - max) - log(sum)."""
    return [
        user for value in (softmax.x, softmax.shifted) for user in value.users
        if user.op == "subtract" and user.elements == softmax.x.elements
        and any(other is log or log in other.operands for other in user.operands)
    ]


def _picked(softmax: Softmax, log: Operation) -> tuple[Operation, Operation] | None:
    """Return the operation that takes one logit, or log-probability, for each token, and the labels or their one-hots.
    """
    values = [softmax.x, softmax.shifted, *_log_probabilities(softmax, log)]
    values += [user for value in values for user in value.users if user.op == "negate"]
    for value in values:
        for user in value.users:
            if user.op == "gather" and user.operands[0] is value and user.elements == softmax.total.elements:
                return user, user.operands[1]
            if user.op in ("select", "multiply") and user.elements == softmax.x.elements:
                chosen = [o for o in user.operands if o is not value]
                sums = [total for total in user.users if total.op == "reduce-sum"]
                hot = [o for o in chosen if _is_one_hot(o)]
                if sums and hot:
                    return sums[0], hot[0]
    return None


def _is_one_hot(operation: Operation) -> bool:
    """Return whether an iota is compared with integers that are data."""
    for near_by in ancestors([operation], 6):
        if near_by.op == "compare" and near_by.facts["direction"] == "EQ":
            return sum(operand.positional for operand in near_by.operands) == 1
    return False
