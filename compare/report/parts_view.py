"""A step by parts of the user's model: a first screen of a dozen lines, and a table with a line a part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .. import targets
from ..base.text import printable
from ..graph import formats
from ..graph.model import STEP_PHASES, StepPhase
from ..graph.render import text_view
from ..model.parts import Part, Piece, time_by_phase
from ..model.places import parse
from ..model.step import Step
from ..model.used_blocks import UsedBlock, model_flops
from .columns import Column
from .table import table

if TYPE_CHECKING:
    from rich.console import RenderableType

LEGEND = (
    "share: of the kernels' time. recompute: forward work that checkpointing repeats. update: what depends on",
    "gradients and is none, as the optimizer. TFLOP/s: of the part's own work, without what is recomputed.",
)
_MOST_LINES, _MOST_LETTERS, _MOST_WIDE = 10, 26, 50
_MOST_UNKNOWN = 0.05
_SHORTEST_US = 5.0  # shorter times are blank: 0.00 ms


@dataclass(frozen=True)
class Line:
    """A part, with the step that it is of."""

    step: Step
    part: Part


def _phase_us(phase: StepPhase) -> Column:
    return Column(
        f"{phase}_us", "µs", f"device time of its kernels of that phase: {phase}", f"{phase} µs",
        lambda line: time_by_phase(line.part.pieces).get(phase) if line.step.time_us else None,
    )


def _rate(line: Line) -> float | None:
    work, time = line.part.model_flops, line.part.time_us
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
    Column("layers", "", "how often the model has it", "layers", lambda line: line.part.layers),
    Column(
        "device_time_us", "µs", "device time of its kernels in a step", "µs", lambda line: line.part.time_us or None
    ),
    Column(
        "share", "share", "of the time of all kernels", "share",
        lambda line: line.part.time_us / line.step.time_us if line.step.time_us else None,
    ),
    *map(_phase_us, STEP_PHASES),
    Column("kernels", "", "number of its kernels", "kernels", lambda line: len(line.part.pieces)),
    Column("bytes_declared", "bytes", "bytes that its kernels declare to move", "MB", lambda line: line.part.bytes),
    Column(
        "model_flops", "FLOP", "of a step, without those of a recomputation", "FLOP",
        lambda line: line.part.model_flops,
    ),
    Column("tflop_per_s", "TFLOP/s", "model_flops over device_time_us", "TFLOP/s", _rate),
)
_SHOWN = tuple(column for column in COLUMNS if column.name not in ("key", "model_flops"))


def lines(step: Step) -> list[Line]:
    """Return a line for each part, the longest first."""
    return [Line(step, part) for part in step.parts]


def render(found: Sequence[Line], *, markdown: bool = False) -> str:
    """Return the table of parts as text or Markdown."""
    return "\n".join([table(found, _SHOWN, markdown), "", *LEGEND])


def headline(step: Step, found: Sequence[UsedBlock]) -> str:
    """Return the time of a step, and the rate of the model's own work beside the peak. found: its blocks."""
    time = step.device_us or step.time_us
    target = targets.of_device(step.device)
    peak = None if target is None else targets.load(target).peak("bfloat16")
    rate = model_flops(step.parts, found) / time * 1e6
    share = f", {formats.share(rate, peak)} of its peak in bf16" if peak and rate else ""
    work = f"; {formats.flops(rate)}/s of the model's own work{share}" if rate and not _has_unknown_work(step) else ""
    return f"a step takes {formats.span(time)}{f' on {step.device}' if step.device else ''}{work}"


def _has_unknown_work(step: Step) -> bool:
    """Return whether products of which no FLOPs are known take a share of the time that hides the rate."""
    unknown = (
        piece.time_us for piece in step.pieces
        if piece.kernel.flops is None and piece.kernel.kind in ("gemm", "attention")
    )
    return sum(unknown) > _MOST_UNKNOWN * step.time_us


def screen(step: Step) -> RenderableType:
    """Return the first screen: a dozen groups of parts that hold the time of a step."""
    total, phases = step.time_us, step.by_phase
    groups = [group for group in step.groups if group.time_us >= _SHORTEST_US]
    shown, rest = groups[:_MOST_LINES], groups[_MOST_LINES:]
    grid = text_view.columns(4, 7, None, *[9] * len(phases), right=(0, 1, *range(3, 3 + len(phases))), gap=1)
    layers = f"part ({step.layers} layers as one)" if step.layers > 1 else "part"
    grid.add_row(*map(text_view.plain, ("", "ms", layers, *phases)), style="dim")

    def add(title: str, pieces: Sequence[Piece], style: str = "") -> None:
        split = time_by_phase(pieces)
        time = sum(split.values())
        cells = (formats.share(time, total), _ms(time), title, *(_ms(split.get(phase)) for phase in phases))
        grid.add_row(*(text_view.plain(cell, style) for cell in cells))

    add("all kernels", step.pieces, "bold")
    for group in shown:
        where = f" ({where})" if (where := step.where(group)) else ""
        names = ", ".join(_short(name) for name in step.names(group))
        add(f"{printable(names, 80)}{where}", group.pieces)
    if rest:
        more = formats.count(len(rest), "more group")
        add(f"{more}; --view parts lists all", [piece for group in rest for piece in group.pieces])
    return grid


def _short(name: str) -> str:
    """Return a name without its first words, then without its middle, so that it fits on a line of a terminal."""
    while len(name) > _MOST_LETTERS and "." in name:
        name = name.partition(".")[2]
    return formats.name(name, _MOST_LETTERS)


def _ms(us: float | None) -> str:
    return "" if us is None or us < _SHORTEST_US else f"{us / 1e3:.2f}"
