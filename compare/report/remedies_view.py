"""Changes to a step: the line, what to write, the gain that measured rows promise, and these rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .. import targets
from ..base.usage import UsageError
from ..graph import formats
from ..model.parts import parts
from ..model.remedies import Remedy, remedies
from ..model.step import Step, step_of
from ..model.used_blocks import UsedBlock, used_blocks
from ..sources.source import Source
from .columns import Column
from .table import table

_MOST_WIDE, _MOST_SENTENCES = 60, 3
LEGEND = (
    "before, after: device time of the part in a step. after: the time of the measured case that is named, scaled by",
    "work. Lines of one number exclude each other; the first is the least effort.",
)


@dataclass(frozen=True)
class Line:
    """A remedy. number: of the block that it changes; remedies of one block exclude each other."""

    number: int
    step: Step
    remedy: Remedy

    @property
    def where(self) -> str:
        return self.step.where_of(parts(self.remedy.used.pieces))

    @property
    def part(self) -> str:
        return ", ".join(dict.fromkeys(map(self.step.name, parts(self.remedy.used.pieces))))


COLUMNS = (
    Column("number", "", "of the block; lines of one number exclude each other", "", lambda line: line.number),
    Column("where", "", "file and lines of the part", "where", lambda line: line.where),
    Column("part", "", "what the user's code calls", "part", lambda line: line.part),
    Column("block", "", "the block of the suite that it is", "block", lambda line: line.remedy.used.block),
    Column("layers", "", "how often the step has it", "layers", lambda line: line.remedy.used.layers),
    Column(
        "change", "", "what to write", "change", lambda line: line.remedy.advice.change,
        lambda line: formats.name(line.remedy.advice.change, _MOST_WIDE),
    ),
    Column("kind", "", "switch, library or kernel", "kind", lambda line: line.remedy.advice.kind),
    Column("try", "", "its name for xlafuse capture --try", "try", lambda line: line.remedy.advice.switch),
    Column("before_us", "µs", "device time of the part in a step", "before µs", lambda line: line.remedy.before_us),
    Column("after_us", "µs", "what the measured row promises", "after µs", lambda line: line.remedy.after_us),
    Column("gain_us", "µs", "before_us minus after_us", "gain µs", lambda line: line.remedy.gain_us),
    Column("limits", "", "where it does not apply", "only for", lambda line: line.remedy.limits),
    Column(
        "evidence", "", "measured cases, the row and its time there", "evidence", lambda line: line.remedy.evidence,
        lambda line: formats.name(line.remedy.evidence, _MOST_WIDE),
    ),
)


def lines(step: Step, found: Sequence[UsedBlock]) -> list[Line]:
    """Return the remedies of a step, those of the block with the largest gain first; none where nothing was timed.

    found: its blocks.
    """
    graph, target = next(iter(step.graphs.values()), None), targets.of_device(step.device)
    if graph is None or target is None or not step.time_us:
        return []
    changes = remedies(found, graph.compiler, target, step.time_us)
    return [Line(number, step, remedy) for number, own in enumerate(changes, 1) for remedy in own]


def timed_lines(source: Source) -> list[Line]:
    """Return the remedies of a step that was timed. Raises UsageError where it was not."""
    step = step_of(source)
    if not step.time_us:
        raise UsageError(f"{source.path}: remedies need the times of a step; xlafuse capture takes them")
    return lines(step, used_blocks(source, step.parts))


def render(found: Sequence[Line], *, markdown: bool = False) -> str:
    """Return the remedies as text or Markdown."""
    if not found:
        return "no measured change to a block of this step gains a hundredth of it"
    return "\n".join([table(found, COLUMNS, markdown), "", *LEGEND])


def sentences(found: Sequence[Line], *, every: bool = False) -> list[str]:
    """Return a line a remedy for the first screen: of few blocks the first remedy, unless `every`."""
    first = [line for at, line in enumerate(found) if at == 0 or line.number != found[at - 1].number][:_MOST_SENTENCES]
    shown = list(found) if every else first
    made = [_sentence(line.number, line.where, line.remedy, line.step.time_us) for line in shown]
    more = len(found) - len(shown)
    return [*made, f"{formats.count(more, 'more change')}; --view remedies lists all"] if more else made


def _sentence(number: int, where: str, remedy: Remedy, step_us: float) -> str:
    limits = f" ({remedy.limits})" if remedy.limits else ""
    part = f"{remedy.before_us / 1e3:.1f} → {remedy.after_us / 1e3:.1f} ms"
    step = f"kernels {step_us / 1e3:.1f} → {(step_us - remedy.gain_us) / 1e3:.1f} ms"
    switch = f" (--try {remedy.advice.switch})" if remedy.advice.switch else ""
    return f"{number} {where}  {remedy.advice.change}{limits}: {part}, {step}{switch}; {remedy.evidence}"
