"""Changes to a step: the line, what to write, the gain that measured rows promise, and these rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .. import targets
from ..base.text import number
from ..base.usage import UsageError
from ..graph import formats
from ..graph.analyse.totals import predicted_sum
from ..model.parts import parts
from ..model.places import parse
from ..model.remedies import Remedy, at_their_best, changes
from ..model.step import Step, step_of
from ..model.used_blocks import UsedBlock, used_blocks
from ..sources.source import Source
from .columns import Column
from .table import table

_MOST_WIDE, _MOST_SENTENCES = 60, 3
_NOTABLE = 1.05  # times as fast: a sentence says how much
_MEMORY_SHARE = 0.03  # of a step's memory: a sentence names such a change
LEGEND = (
    "A change has the device time of its part in a step, before and after, and the measured cases behind it. A layer",
    "takes their times, scaled by the ratio of the work. Lines of one number exclude each other; the first is the",
    'least effort. "then" presupposes line 1. GB: change of the peak of memory. "at most": an implementation, maybe of',
    "another framework, was measured, and no change is known that reaches its time. ~ after: from measured cases.",
    "~ before: predicted from the compiled kernels, because nothing of the step was measured.",
)


@dataclass(frozen=True)
class Line:
    """A remedy. number: of the block that it changes; remedies of one block exclude each other."""

    number: int
    step: Step
    remedy: Remedy

    @property
    def where(self) -> str:
        place = parse(self.remedy.place)
        return self.step.where_of(parts(self.remedy.pieces)) if place is None else place.where

    @property
    def about(self) -> str:
        """The mark of predicted times."""
        return "~" if self.step.predicted else ""

    @property
    def part(self) -> str:
        return ", ".join(dict.fromkeys(map(self.step.name, parts(self.remedy.pieces))))


COLUMNS = (
    Column("number", "1", "of the block; lines of one number exclude each other", "", lambda line: line.number),
    Column("where", "", "file and lines of the part", "where", lambda line: line.where),
    Column(
        "part", "", "what the user's code calls", "part", lambda line: line.part,
        lambda line: formats.name(line.part, _MOST_WIDE),
    ),
    Column("block", "", "the block of the suite that it is", "block", lambda line: line.remedy.advice.block),
    Column("layers", "1", "how often the step has it", "layers", lambda line: line.remedy.layers),
    Column(
        "change", "", "what to write", "change", lambda line: line.remedy.advice.change,
        lambda line: formats.name(line.remedy.advice.change, _MOST_WIDE),
    ),
    Column("kind", "", "switch, library, kernel, checkpoint or bound", "kind", lambda line: line.remedy.advice.kind),
    Column("try", "", "its name for xlafuse capture --try", "try", lambda line: line.remedy.advice.switch),
    Column(
        "before_us", "µs", "device time of the part in a step", "before µs", lambda line: line.remedy.before_us,
        lambda line: line.about + number(line.remedy.before_us),
    ),
    Column("after_us", "µs", "what the measured row promises", "after µs", lambda line: line.remedy.after_us),
    Column(
        "gain_us", "µs", "before_us minus after_us", "gain µs", lambda line: line.remedy.gain_us,
        lambda line: line.about + number(line.remedy.gain_us),
    ),
    Column(
        "predicted", "", '"yes" where before_us is predicted, because nothing of the step was measured', "",
        lambda line: "yes" if line.step.predicted else None,
    ),
    Column(
        "memory_bytes", "bytes", "change of the peak of memory", "MB",
        lambda line: line.remedy.memory_bytes,
    ),
    Column("limits", "", "where it does not apply", "only for", lambda line: line.remedy.limits),
    Column(
        "evidence", "", "measured cases, the row and its time there", "evidence", lambda line: line.remedy.evidence,
        lambda line: formats.name(line.remedy.evidence, _MOST_WIDE),
    ),
)


def lines(step: Step, blocks: Sequence[UsedBlock]) -> list[Line]:
    """Return the remedies of a step, those of the block with the largest gain first; none where nothing was timed."""
    numbered = enumerate(changes(step, blocks), 1)
    return [Line(number, step, remedy) for number, of_block in numbered for remedy in of_block]


def timed_lines(source: Source) -> list[Line]:
    """Return the remedies of a step with measured or predicted times. Raises UsageError where it has neither."""
    step = step_of(source)
    if not step.time_us:
        reason = source.unprofiled or "xlafuse capture takes them"
        unknown = predicted_sum(piece.kernel for piece in step.pieces).reason
        raise UsageError(f"{source.path}: remedies need the times of a step; {reason}; not predicted: {unknown}")
    if step.predicted and not step.readers:
        raise UsageError(f"{source.path}: remedies need HLO or Inductor's output, and this is a graph alone")
    return lines(step, used_blocks(step))


def render(found: Sequence[Line], *, markdown: bool = False) -> str:
    """Return the remedies as text, a paragraph each with all measured cases, or as a table in Markdown."""
    if not found:
        measured = " or ".join(targets.load(name).device for name in targets.names() if targets.is_measured(name))
        return f"no change to a block of this step, measured on an {measured}, gains a hundredth of it"
    shown = [table(found, COLUMNS, markdown)] if markdown else [_sentence(line, whole=True) for line in found]
    return "\n".join([*shown, "", *LEGEND])


def sentences(found: Sequence[Line], *, every: bool = False) -> list[str]:
    """Return a line a remedy for the first screen: of few blocks the first remedy, unless `every`."""
    first = [line for at, line in enumerate(found) if at == 0 or line.number != found[at - 1].number][:_MOST_SENTENCES]
    shown = list(found) if every else first
    made = list(map(_sentence, shown))
    more = len(found) - len(shown)
    return [*made, f"{formats.count(more, 'more change')}; --view remedies lists all"] if more else made


def left(step: Step, blocks: Sequence[UsedBlock], found: Sequence[Line]) -> str:
    """Return a sentence about the blocks that need no change; "" where there is none."""
    of_block: dict[str, tuple[float, float]] = {}
    for best in at_their_best(step, blocks, [line.remedy for line in found]):
        time, least = of_block.get(best.used.block, (0.0, 0.0))
        of_block[best.used.block] = time + best.used.time_us, least + best.least_us
    named = [f"{name} ({_ms(time)} ms, at best {_ms(least)})" for name, (time, least) in of_block.items()]
    return f"leave as they are: {', '.join(named)}" if named else ""


def _sentence(line: Line, *, whole: bool = False) -> str:
    remedy, step = line.remedy, line.step
    before = step.device_us or step.time_us
    after = before - remedy.gain_us
    factor = f" ({before / after:.1f}x)" if before > _NOTABLE * after else ""
    gains = [f"{line.about}{_ms(remedy.before_us)} → ~{_ms(remedy.after_us)} ms", f"step ~{_ms(after)} ms{factor}"]
    if remedy.advice.kind in ("checkpoint", "bound"):
        gains = [f"-{line.about}{_ms(remedy.gain_us)} ms"]
    if abs(remedy.memory_bytes) > _MEMORY_SHARE * sum(program.bytes for program in step.memory.values()):
        gains.append(f"{'+' if remedy.memory_bytes > 0 else '-'}{abs(remedy.memory_bytes) / 1e9:.1f} GB")
    limits = f" ({remedy.limits})" if remedy.limits else ""
    switch = f" (--try {remedy.advice.switch})" if remedy.advice.switch else ""
    evidence = remedy.evidence if whole or not remedy.measured else remedy.measured[0].short
    change = f"{line.number} {line.where or line.part}  {remedy.advice.change}{limits}"
    return f"{change}: {', '.join(gains)}{switch}; {evidence}"


def _ms(us: float) -> str:
    return f"{us / 1e3:.1f}"
