"""The bands of a drawing: the stages of its graphs in execution order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ....graph.analyse.align import Alignment, phase_of
from ....graph.analyse.totals import known_declared_bytes
from ....graph.model import PHASES, FusionGraph, Kernel, Phase
from ....graph.operations import MOVEMENT, token

UNNAMED = "no stage named"
MOST_BANDS = 20  # a few screens
SMALL = 0.03  # share of a column's cost


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
        found = []
        for index in cell.kernels or ():
            ops = kernels[index].source_ops
            own = [i for i, op in enumerate(ops) if belongs(op.stage, alignment.rows[row].stage)]
            within = sum(own) / len(own) / len(ops) if own else 0
            cost = kernels[index].device_time_us or known_declared_bytes(kernels[index]) / 1e6
            found.append((index + within, cost + 1e-9))
        if found:
            positions.append(sum(at * cost for at, cost in found) / sum(cost for _, cost in found) / len(kernels))
    return sum(positions) / len(positions) if positions else 0.0


def grouped(
    bands: Sequence[Band], columns: Sequence[tuple[Sequence[Kernel], Mapping[int, Sequence[int]]]]
) -> list[list[int]]:
    """Return groups of band numbers. With more than MOST_BANDS bands, neighbouring bands of little cost share a group.

    columns: for each visible column its kernels, and the bands of each kernel.
    """
    if len(bands) <= MOST_BANDS:
        return [[number] for number in range(len(bands))]
    share = [0.0] * len(bands)
    for kernels, held in columns:
        timed = any(kernel.device_time_us is not None for kernel in kernels)
        cost = [(kernel.device_time_us if timed else known_declared_bytes(kernel)) or 0.0 for kernel in kernels]
        own = [0.0] * len(bands)
        for index, numbers in held.items():
            for number in numbers:
                own[number] += cost[index] / len(numbers) / (sum(cost) or 1)
        share = [max(pair) for pair in zip(share, own, strict=True)]
    small, groups = SMALL, _neighbours(bands, share, SMALL)
    while len(groups) > MOST_BANDS and small < 1:
        small *= 1.5
        groups = _neighbours(bands, share, small)
    return groups


def _neighbours(bands: Sequence[Band], share: Sequence[float], small: float) -> list[list[int]]:
    groups: list[list[int]] = []
    for number, band in enumerate(bands):
        last = groups[-1][-1] if groups else None
        if last is not None and bands[last].phase == band.phase and max(share[last], share[number]) < small:
            groups[-1].append(number)
        else:
            groups.append([number])
    return groups


def computed(kernel: Kernel, held: list[int], bands: Sequence[Band]) -> list[int]:
    """Return the bands in which the kernel computes; if there are none, all its bands.

    Views, copies and conversions do not count as computing.
    """
    computing = [
        i for i in held
        if any(
            phase_of(kernel, op) == bands[i].phase and belongs(op.stage, bands[i].label)
            for op in kernel.source_ops if token(op.op) not in MOVEMENT
        )
    ]
    return computing or held


def belongs(stage: str, label: str) -> bool:
    """True if the stage is the band's or lies below it; bands cut stages to a common depth."""
    return stage == label or stage.startswith(f"{label}/")
