"""A step by parts of the user's model: a table with a line a part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..base.text import number
from ..graph import formats
from ..graph.analyse.totals import predicted_sum
from ..graph.model import STEP_PHASES, PredictedTime, StepPhase
from ..model.parts import Part, time_by_phase
from ..model.places import parse
from ..model.step import Step
from ..model.used_blocks import UsedBlock
from ..model.work import part_flops
from .columns import Column, predicted_columns
from .table import PREDICTED, table

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

    @property
    def measured_us(self) -> float | None:
        return None if self.step.predicted else self.part.time_us or None

    @property
    def predicted(self) -> PredictedTime | None:
        """The sum of its kernels' predicted times, as far as they are known; None where the step was measured."""
        kernels = [piece.kernel for piece in self.part.pieces]
        known = [kernel for kernel in kernels if kernel.predicted_us is not None]
        return predicted_sum(known or kernels) if self.step.predicted else None

    @property
    def unpredicted(self) -> int | None:
        if not self.step.predicted:
            return None
        return sum(piece.kernel.predicted_us is None for piece in self.part.pieces) or None


def _phase_us(phase: StepPhase, *, predicted: bool) -> Column:
    """Return the column of a phase's measured time, or of its predicted one."""

    def time(line: Line) -> float | None:
        return time_by_phase(line.part.pieces).get(phase) if line.step.predicted is predicted else None

    def about(line: Line) -> str:
        return f"~{number(us)}" if (us := time(line)) else ""

    doc = f"{'predicted ' * predicted}device time of its kernels of that phase: {phase}"
    name, header = f"{'predicted_' * predicted}{phase}_us", f"{phase} µs"
    return Column(name, "µs", doc, header, lambda line: time(line) or None, about if predicted else None)


def _rate(line: Line) -> float | None:
    work, time = line.model_flops, line.measured_us
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
        "device_time_us", "µs", "device time of its kernels in a step", "µs", lambda line: line.measured_us
    ),
    *predicted_columns(
        lambda line: line.predicted, "device time of its kernels, without gaps, where nothing of the step was measured"
    ),
    Column("unpredicted", "1", "number of its kernels without a prediction, whose time is missing", "not predicted"),
    Column(
        "share", "share", "of the time of all kernels, measured or predicted", "share",
        lambda line: line.part.time_us / line.step.time_us if line.step.time_us else None,
    ),
    *(_phase_us(phase, predicted=predicted) for predicted in (False, True) for phase in STEP_PHASES),
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
_NOT_SHOWN = ("key", "model_flops", "predicted_low_us", "predicted_high_us", "predicted_reason")
_SHOWN = tuple(column for column in COLUMNS if column.name not in _NOT_SHOWN)


def lines(step: Step, blocks: Sequence[UsedBlock]) -> list[Line]:
    """Return a line for each part, the longest first."""
    work = part_flops(step, blocks)
    return [Line(step, part, work[part.key]) for part in step.parts]


def render(found: Sequence[Line], *, markdown: bool = False) -> str:
    """Return the table of parts as text or Markdown."""
    total = _total(found[0].step) if found and found[0].step.predicted else []
    return "\n".join([table(found, _SHOWN, markdown), "", *total, *LEGEND])


def _total(step: Step) -> list[str]:
    """Return what a step is predicted to take, or why that is unknown."""
    from ..graph.render.text_view import predicted_words

    calls = {formats.name(name, _MOST_WIDE): predicted_words(graph) for name, graph in step.graphs.items()}
    if not any(calls.values()):
        return [formats.predicted(predicted_sum(piece.kernel for piece in step.pieces)), ""]
    lines = [f"{name}: a call is predicted to take {time} on the device" for name, time in calls.items() if time]
    return [*lines, PREDICTED, ""]
