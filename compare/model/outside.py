"""Parts of what ran outside of compiled graphs, by the host's calls: an optimizer's operations, clipping."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..graph.model import STEP_PHASES, Kernel, StepPhase
from ..profiles.kernel_times import KernelTimes, kernel_times
from ..sources.profiled import ProfiledSteps
from .parts import Piece


def in_profile(pieces: Sequence[Piece], profile: ProfiledSteps) -> list[Piece]:
    """Return the kernels of a profile: those of graphs, then the others. A compiled optimizer's are its own."""
    lines = kernel_times(profile.steps, profile.joined, {})
    of_host = {
        (line.graph, index): line.host_part
        for line in lines if line.graph and line.host_part.name for index in line.kernels
    }
    inside = []
    for piece in pieces:
        part = of_host.get((piece.graph, piece.index))
        inside.append(piece if part is None else replace(piece, key=part.name, phase=_phase(part.phase)))
    return [*inside, *(_piece(number, line) for number, line in enumerate(lines) if not line.graph)]


def _piece(number: int, line: KernelTimes) -> Piece:
    kernel = Kernel(line.name, "library", launches=line.launches, device_time_us=line.step.median)
    return Piece("", number, kernel, line.host_part.name or ", ".join(line.host_ops), _phase(line.host_part.phase))


def _phase(name: str) -> StepPhase:
    return next((phase for phase in STEP_PHASES if phase == name), "forward")
