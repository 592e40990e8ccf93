"""The phase of a training step that a kernel belongs to."""

from __future__ import annotations

from ..graph.model import STEP_PHASES, FusionGraph, Kernel, SourceOp, StepPhase
from .weights import weight

_OF_GRADIENTS: dict[StepPhase, StepPhase] = {"recompute": "backward", "forward": "update"}


def step_phases(graph: FusionGraph) -> list[StepPhase]:
    """Return the phase of each kernel.

    A kernel is of the phase that most of its work is marked with. An operation that an earlier kernel has computed does
    not count: fusion computes it again for free. A kernel that depends on a gradient is none of forward: it updates the
    model, or is backward where most of its work is marked as computed again.
    """
    phases: list[StepPhase] = []
    of_gradients: set[str] = set()
    computed: set[str] = set()
    for kernel in graph.kernels or ():
        phase = _marked(kernel, computed)
        if not of_gradients.isdisjoint(access.buffer for access in kernel.inputs or ()):
            phase = _OF_GRADIENTS.get(phase, phase)
        if phase in ("backward", "update"):
            of_gradients |= {access.buffer for access in kernel.outputs or ()}
        computed |= {op.site for op in kernel.source_ops if op.site}
        phases.append(phase)
    return phases


def _marked(kernel: Kernel, computed: set[str]) -> StepPhase:
    """Return the phase by the marks of a kernel's operations; of its graph where none has an operation."""
    new = [op for op in kernel.source_ops if op.site not in computed] or kernel.source_ops
    shares = dict.fromkeys(STEP_PHASES, 0.0)
    for op in new:
        shares[_phase(op, kernel)] += weight(op, kernel)
    if not any(shares.values()):
        return kernel.phase
    return max(STEP_PHASES, key=lambda phase: shares[phase])


def _phase(op: SourceOp, kernel: Kernel) -> StepPhase:
    if op.rematerialized:
        return "recompute"
    return "backward" if op.backward or kernel.phase == "backward" else "forward"
