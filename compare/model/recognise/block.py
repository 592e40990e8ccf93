"""A recognised block."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ...graph.model import StepPhase
from .operation_graph import Occurrence, Operation


@dataclass(frozen=True)
class RecognisedBlock:
    """A block of the suite in a user's program.

    block: its name in `compare.spec.blocks`. sizes: by the names of that block's axes; a size that the program does not
        show is left out, such as `causal` where the mask is data.
    dtype: short ("bf16"), of the operands. phase: a forward block, the same computed again, or its gradient.
    attributes: what the sizes do not say ("mask": "data", "activation": "gelu_erf", ...).
    operations: its operations in this phase. inputs: the values that it takes. result: its last operation; of a
        gradient, that of the block that it belongs to.
    """

    block: str
    sizes: Mapping[str, int]
    dtype: str
    phase: StepPhase
    operations: tuple[Operation, ...]
    inputs: tuple[Operation, ...]
    result: Operation
    attributes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def occurrences(self) -> tuple[Occurrence, ...]:
        """The occurrences of its operations that belong to its phase. No compiler marks an optimizer's: all count."""
        occurrences = (occurrence for operation in self.operations for occurrence in operation.occurrences)
        return tuple(dict.fromkeys(one for one in occurrences if self.phase in (one.phase, "update")))

    @property
    def kernels(self) -> tuple[str, ...]:
        """Names of the kernels that compute a part of it; a kernel may also hold operations of other blocks."""
        return tuple(dict.fromkeys(occurrence.kernel for occurrence in self.occurrences if occurrence.kernel))

    @property
    def lines(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(occurrence.line for occurrence in self.occurrences if occurrence.line))


def own_phase(operation: Operation) -> StepPhase:
    """Return the phase in which a block is found: forward where its operation also runs there, else recompute."""
    phases = operation.phases()
    for phase in ("forward", "recompute", "backward"):
        if phase in phases:
            return phase
    return "forward"
