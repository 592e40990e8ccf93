"""The phase of a training step that a kernel belongs to."""

from __future__ import annotations

from ..graph.model import STEP_PHASES, FusionGraph, Kernel, SourceOp, StepPhase
from .weights import weight


def step_phases(graph: FusionGraph) -> list[StepPhase]:
    """Return the phase of each kernel.

    A kernel is of the phase that most of its work is marked with. One that depends on a gradient, and is not
    marked backward, updates the model.
    """
    phases: list[StepPhase] = []
    of_gradients: set[str] = set()
    for kernel in graph.kernels or ():
        phase = _marked(kernel)
        reads = {access.buffer for access in kernel.inputs or ()}
        if phase == "forward" and not of_gradients.isdisjoint(reads):
            phase = "update"
        if phase in ("backward", "update"):
            of_gradients |= {access.buffer for access in kernel.outputs or ()}
        phases.append(phase)
    return phases


def _marked(kernel: Kernel) -> StepPhase:
    """Return the phase by the marks of a kernel's operations; of its graph where none has an operation."""
    shares = dict.fromkeys(STEP_PHASES, 0.0)
    for op in kernel.source_ops:
        shares[_phase(op, kernel)] += weight(op, kernel)
    if not any(shares.values()):
        return kernel.phase
    return max(STEP_PHASES, key=lambda phase: shares[phase])


def _phase(op: SourceOp, kernel: Kernel) -> StepPhase:
    if op.rematerialized:
        return "recompute"
    return "backward" if op.backward or kernel.phase == "backward" else "forward"

