"""A step by parts of the user's model: a table with a line a part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..graph import formats
from ..graph.model import STEP_PHASES, StepPhase
from ..model.parts import Part, time_by_phase
from ..model.places import parse
from ..model.step import Step
from ..model.used_blocks import UsedBlock
from ..model.work import part_flops
from .columns import Column
from .table import table

if TYPE_CHECKING:
    pass

LEGEND = (
    "share: of the kernels' time. recompute: forward work that checkpointing repeats. update: kernels that use",
    "gradients, as an optimizer's. TFLOP/s: of the part's own work, over all of its time. Recomputation takes time,",
    "and counts as no work. peak: buffers that the part wrote, when the program takes the most memory.",
)
_MOST_WIDE = 50


@dataclass(frozen=True)
class Line:
    """A part, with the step that it is of. model_flops: its own work; None where products hide theirs."""

    step: Step
    part: Part
    model_flops: float | None


def _phase_us(phase: StepPhase) -> Column:
    return Column(
        f"{phase}_us", "µs", f"device time of its kernels of that phase: {phase}", f"{phase} µs",
        lambda line: time_by_phase(line.part.pieces).get(phase) if line.step.time_us else None,
    )


def _rate(line: Line) -> float | None:
    work, time = line.model_flops, line.part.time_us
    return work / time / 1e6 if work and time else None


def _where(line: Line) -> str:
    place = parse(line.part.key)
    return "" if place is None else place.where


COLUMNS = (
    Column(
        "part", "", "what the user's code calls it, or its named scope", "part", lambda line: line.step.name(line.part),
        lambda line: formats.name(line.step.name(line.part), _MOST_WIDE),
    ),
    Column("where", "", "file and line of the call", "where", _where),
    Column(
        "key", "", "the named scope without numbers of layers, or the call with its columns and function", "key",
        lambda line: line.part.key,
    ),
    Column(
        "device_time_us", "µs", "device time of its kernels in a step", "µs", lambda line: line.part.time_us or None
    ),
    Column(
        "share", "share", "of the time of all kernels", "share",
        lambda line: line.part.time_us / line.step.time_us if line.step.time_us else None,
    ),
    *map(_phase_us, STEP_PHASES),
    Column("kernels", "1", "number of its kernels", "kernels", lambda line: len(line.part.pieces)),
    Column("bytes_declared", "bytes", "bytes that its kernels declare to move", "MB", lambda line: line.part.bytes),
    Column(
        "model_flops", "FLOP", "of a step, without those of a recomputation", "FLOP",
        lambda line: line.model_flops,
    ),
    Column(
        "peak_bytes", "bytes", "buffers that its kernels wrote, when the buffers of the program take the most memory",
        "peak MB", lambda line: line.step.at_the_peak.get(line.part.key, 0),
    ),
    Column("tflop_per_s", "TFLOP/s", "model_flops over device_time_us, recomputation included", "TFLOP/s", _rate),
)
_SHOWN = tuple(column for column in COLUMNS if column.name not in ("key", "model_flops"))


def lines(step: Step, blocks: Sequence[UsedBlock]) -> list[Line]:
    """Return a line for each part, the longest first."""
    work = part_flops(step, blocks)
    return [Line(step, part, work[part.key]) for part in step.parts]


def render(found: Sequence[Line], *, markdown: bool = False) -> str:
    """Return the table of parts as text or Markdown."""
    return "\n".join([table(found, _SHOWN, markdown), "", *LEGEND])
