"""The bands of a drawing: the stages of its graphs in execution order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ....graph.analyse.align import Alignment, phase_of
from ....graph.analyse.totals import known_declared_bytes
from ....graph.model import PHASES, FusionGraph, Kernel, Phase
from ....graph.operations import MOVEMENT, token

UNNAMED = "no stage named"


@dataclass(frozen=True)
class Band:
    """A stage of one phase. row: its row in the alignment; None for kernels that name no stage."""

    phase: Phase
    label: str
    row: int | None


def of_graphs(graphs: Sequence[FusionGraph], alignment: Alignment) -> list[Band]:
    """Return the bands of forward, followed by those of backward.

    If some kernels of a graph name a stage and others do not, the phase ends with a band without a stage. A phase
    without any stage has only this band.
    """
    bands = []
    for phase in PHASES:
        rows = [Band(phase, row.stage, i) for i, row in enumerate(alignment.rows) if row.phase == phase]
        rows.sort(key=lambda band: _position(graphs, alignment, band.row or 0))
        loose = not rows and any(kernel.phase == phase for graph in graphs for kernel in graph.kernels or ())
        loose = loose or any(
            0 < sum(kernels[i].phase == phase for i in without) < sum(kernel.phase == phase for kernel in kernels)
            for kernels, without in zip((g.kernels or () for g in graphs), alignment.unattributed, strict=True)
        )
        bands += [*rows, *([Band(phase, UNNAMED, None)] if loose else [])]
    return bands


def _position(graphs: Sequence[FusionGraph], alignment: Alignment, row: int) -> float:
    """Return a stage's mean position in the graphs' launch orders, weighted by the cost of its kernels.

    A stage's first kernel would mislead: compilers launch a mask or an index long before the kernel that uses it.
    """
    positions = []
    for graph, cell in zip(graphs, alignment.rows[row].cells, strict=True):
        kernels = graph.kernels or ()
        weighted = []
        for index in cell.kernels or ():
            ops = kernels[index].source_ops
            of_stage = [i for i, op in enumerate(ops) if belongs(op.stage, alignment.rows[row].stage)]
            within = sum(of_stage) / len(of_stage) / len(ops) if of_stage else 0
            cost = kernels[index].device_time_us or known_declared_bytes(kernels[index]) / 1e6
            weighted.append((index + within, cost + 1e-9))
        if weighted:
            positions.append(sum(at * cost for at, cost in weighted) / sum(cost for _, cost in weighted) / len(kernels))
    return sum(positions) / len(positions) if positions else 0.0


def computed(kernel: Kernel, numbers: list[int], bands: Sequence[Band]) -> list[int]:
    """Return the bands in which the kernel computes; if there are none, all its bands.

    Views, copies and conversions do not count as computing.
    """
    computing = [
        i for i in numbers
        if any(
            phase_of(kernel, op) == bands[i].phase and belongs(op.stage, bands[i].label)
            for op in kernel.source_ops if token(op.op) not in MOVEMENT
        )
    ]
    return computing or numbers


def belongs(stage: str, label: str) -> bool:
    """True if the stage is the band's or lies below it; bands cut stages to a common depth."""
    return stage == label or stage.startswith(f"{label}/")
