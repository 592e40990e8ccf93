"""All blocks of the suite in a user's program."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from ..operation_graph import OperationGraph
from .attention import attentions
from .block import RecognisedBlock
from .gradients import gradient_of
from .mlp import mixtures, mlps
from .norms import norms
from .optimizer import updates
from .rope import ropes
from .tables import cross_entropies, embeddings

_FINDERS: tuple[Callable[[OperationGraph], Iterable[RecognisedBlock]], ...] = (
    mlps, mixtures, norms, cross_entropies, embeddings, updates,
)


def recognise(graph: OperationGraph) -> list[RecognisedBlock]:
    """Return the blocks in a program: forward blocks, those computed again, and gradients, in the program's order.

    A forward block whose result backward computes again appears a second time, with phase "recompute". What no pattern
    fits is left out.
    """
    found = list(attentions(graph))
    found += ropes(graph, found)
    for finder in _FINDERS:
        found += finder(graph)
    found = _without_tables_of_rope(found)
    again = [
        replace(block, phase="recompute") for block in found
        if block.phase == "forward" and "recompute" in block.result.phases()
    ]
    gradients = [gradient for block in found if block.phase != "update" and (gradient := gradient_of(block))]
    return sorted([*found, *again, *gradients], key=_place)


def _without_tables_of_rope(found: list[RecognisedBlock]) -> list[RecognisedBlock]:
    """Leave out lookups of cosines and sines, which belong to a rotation."""
    angles = {value for block in found if block.block == "rope" for value in block.inputs}
    return [block for block in found if block.block != "embedding" or block.result not in angles]


def _place(block: RecognisedBlock) -> int:
    return min(operation.number for operation in block.operations)
