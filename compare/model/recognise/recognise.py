"""All blocks of the suite in a user's program."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from .attention import attentions
from .block import RecognisedBlock
from .gradients import gradient_of
from .mlp import mixtures, mlps
from .norms import norms
from .operation_graph import OperationGraph
from .optimizer import updates
from .rope import ropes
from .tables import cross_entropies, embeddings

_FINDERS: tuple[Callable[[OperationGraph], Iterable[RecognisedBlock]], ...] = (
    mlps, mixtures, norms, cross_entropies, embeddings, updates,
)
# A compiler repeats other operations wherever that saves an array.
_COSTLY = frozenset("product ragged-product attention reduce-sum reduce-max variance gather".split())


def recognise(graph: OperationGraph) -> list[RecognisedBlock]:
    """Return the blocks in a program: forward blocks, those computed again, and gradients, in the program's order.

    A forward block of which backward computes a product or a reduction again appears a second time, with phase
    "recompute" and these operations. Operations that fit no pattern belong to no block.
    """
    found = list(attentions(graph))
    found += ropes(graph, found)
    for finder in _FINDERS:
        found += finder(graph)
    found = _without_tables_of_rope(found)
    again = [repeated for block in found if (repeated := _computed_again(block))]
    gradients = [gradient for block in found if block.phase != "update" and (gradient := gradient_of(block))]
    return sorted([*found, *again, *gradients], key=_place)


def _computed_again(block: RecognisedBlock) -> RecognisedBlock | None:
    operations = tuple(operation for operation in block.operations if "recompute" in operation.phases())
    if block.phase != "forward" or not any(operation.op in _COSTLY for operation in operations):
        return None
    partial = block.result.op == "product" and block.result not in operations
    attributes = {**block.attributes, "without_last_product": True} if partial else block.attributes
    return replace(block, phase="recompute", operations=operations, attributes=attributes)


def _without_tables_of_rope(found: list[RecognisedBlock]) -> list[RecognisedBlock]:
    """Leave out lookups of cosines and sines, which belong to a rotation."""
    angles = {value for block in found if block.block == "rope" for value in block.inputs}
    return [block for block in found if block.block != "embedding" or block.result not in angles]


def _place(block: RecognisedBlock) -> int:
    return min(operation.number for operation in block.operations)
