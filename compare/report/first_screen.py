"""The first screen of a step: its time, parts in a dozen lines, memory, and the changes that gain most."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .. import targets
from ..base.text import printable
from ..base.usage import join_some
from ..graph import formats
from ..graph.model import StepPhase
from ..graph.render import text_view
from ..model.parts import Piece, time_by_phase
from ..model.precision import precision_of_products
from ..model.step import Step, step_of
from ..model.used_blocks import UsedBlock, block_of, used_blocks
from ..model.work import model_flops
from ..sources.source import Source
from . import parts_view, remedies_view
from .columns import as_data

if TYPE_CHECKING:
    from rich.console import RenderableType

_DOTTED = re.compile(r"\w+\.[\w.]+")
_MOST_LINES, _MOST_LETTERS = 10, 26
_MOST_NAMES = 4, 2  # of a group's parts: without a block that they are, and with one
_LEAST_MEMORY = 0.05  # of a program's memory: a sentence names such a part
_LEAST_WAIT = 0.05  # of a step: the headline names such a time between two steps
_LEAST_BYTES = 50_000_000  # a program with less has no line about memory
_PEAKS = {"bfloat16": "bf16", "float32-ieee": "float32", "float32-tf32": "TF32"}
_SHORTEST_US = 5.0  # shorter times are blank: 0.00 ms


@dataclass(frozen=True)
class Group:
    """A line: a group of parts with its share of the kernels' time, and its time by phase."""

    title: str
    share: str
    time_us: float
    by_phase: Mapping[StepPhase, float]


@dataclass(frozen=True)
class FirstScreen:
    """A step that was timed. blocks: of the suite, in it. changes: all remedies."""

    step: Step
    blocks: Sequence[UsedBlock]
    changes: Sequence[remedies_view.Line]

    @property
    def headline(self) -> str:
        """The time of the step, how long its GPU waits, and the rate of the model's own work beside the peak."""
        step = self.step
        time = step.device_us or step.time_us
        target = targets.of_device(step.device)
        precision = precision_of_products(step.pieces)
        peak = None if target is None else targets.load(target).peak(precision)
        rate = (model_flops(step, self.blocks) or 0.0) / time * 1e6
        share = f", {formats.share(rate, peak)} of the peak in {_PEAKS[precision]}" if peak else ""
        work = f"; {formats.flops(rate)}/s of model work{share}" if rate else ""
        idle = f", idle {formats.span(step.idle_us)}" if step.idle_us else ""
        wait = f", and {formats.span(step.wait_us)} until the next one" if step.wait_us > _LEAST_WAIT * time else ""
        if wait and step.before_call_us:
            wait += f" ({formats.span(step.before_call_us)} of it before Python calls {step.program})"
        return f"a step takes {formats.span(time)}{f' on {step.device}' if step.device else ''}{idle}{wait}{work}"

    @property
    def column(self) -> str:
        """The heading of the groups."""
        return f"part ({self.step.layers} layers as one)" if self.step.layers > 1 else "part"

    @property
    def groups(self) -> list[Group]:
        """All kernels, then groups of parts that hold their time, the longest first."""
        groups = [group for group in self.step.groups if group.time_us >= _SHORTEST_US]
        found = [self._group("all kernels", self.step.pieces)]
        for group in groups[:_MOST_LINES]:
            where = f" ({where})" if (where := self.step.where(group)) else ""
            block = block_of(group.pieces, self.blocks)
            names = join_some([_short(name) for name in self.step.names(group)], _MOST_NAMES[bool(block)])
            found.append(self._group(f"{f'{block}: ' if block else ''}{printable(names, 80)}{where}", group.pieces))
        if rest := groups[_MOST_LINES:]:
            more = f"{formats.count(len(rest), 'more group')}; --view parts lists all"
            found.append(self._group(more, [piece for group in rest for piece in group.pieces]))
        return found

    def _group(self, title: str, pieces: Sequence[Piece]) -> Group:
        by_phase = time_by_phase(pieces)
        time = sum(by_phase.values())
        return Group(title, formats.share(time, self.step.time_us), time, by_phase)

    @property
    def memory(self) -> str:
        """The program with the most memory, and the parts whose buffers take it; "" without one."""
        step = self.step
        most = step.memory.get(step.largest)
        if most is None:
            return ""
        named = {part.key: step.name(part) for part in step.parts}
        sizes: dict[str, int] = {}
        for key, size in most.between.items():
            sizes[named.get(key) or "others"] = sizes.get(named.get(key) or "others", 0) + size
        parts = [
            f"{_short(name)} {_gb(size)}" for name, size in sorted(sizes.items(), key=lambda item: -item[1])
            if size > _LEAST_MEMORY * most.bytes
        ]
        between = f"between kernels {_gb(sum(sizes.values()))}{f' ({join_some(parts, 3)})' if parts else ''}"
        held = f"arguments {_gb(most.arguments)}, results {_gb(most.results)}, {between}"
        donatable = step.donatable_bytes
        donate = f"; donate_argnums saves {_gb(donatable)}" if donatable > _LEAST_MEMORY * most.bytes else ""
        peak = f"peak memory of a program {_gb(most.bytes)} GB: {held}{donate}"
        return peak if most.bytes > _LEAST_BYTES else ""

    def advice(self, *, every: bool = False) -> list[str]:
        """Return a line a change, of few blocks unless `every`, and one about the blocks that need none."""
        changes = remedies_view.sentences(self.changes, every=every)
        return [*changes, *filter(None, [remedies_view.left(self.step, self.blocks, self.changes)])]

    def terminal(self, *, every: bool = False) -> Iterator[RenderableType]:
        """Yield the screen for a terminal, from top to bottom."""
        phases = self.step.by_phase
        grid = text_view.columns(4, 7, None, *[9] * len(phases), right=(0, 1, *range(3, 3 + len(phases))), gap=1)
        grid.add_row(*map(text_view.plain, ("", "ms", self.column, *phases)), style="dim")
        for number, group in enumerate(self.groups):
            cells = (
                group.share, milliseconds(group.time_us), group.title,
                *(milliseconds(group.by_phase.get(phase)) for phase in phases),
            )
            grid.add_row(*(text_view.plain(cell, "" if number else "bold") for cell in cells))
        yield text_view.plain(self.headline)
        yield grid
        if self.memory:
            yield text_view.plain(self.memory, "dim")
        yield from map(text_view.plain, self.advice(every=every))

    def to_json(self) -> dict[str, Any]:
        """Return the parts and the remedies by the names of their columns, and the memory of each program in bytes."""
        memory = {
            name: {"bytes": most.bytes, "arguments": most.arguments, "results": most.results, "between": most.between}
            for name, most in self.step.memory.items()
        }
        return {
            "layers": self.step.layers, "model_flops": model_flops(self.step, self.blocks), "memory": memory,
            "idle_us": self.step.idle_us, "wait_us": self.step.wait_us, "before_call_us": self.step.before_call_us,
            "parts": as_data(parts_view.lines(self.step, self.blocks), parts_view.COLUMNS),
            "remedies": as_data(self.changes, remedies_view.COLUMNS),
        }


def first_screen(source: Source) -> FirstScreen | None:
    """Return the first screen of a profile; None where no kernel of it was timed."""
    step = step_of(source)
    if source.profile is None or not step.time_us:
        return None
    blocks = used_blocks(step)
    return FirstScreen(step, blocks, remedies_view.lines(step, blocks))


def milliseconds(us: float | None) -> str:
    """Return a time with two digits behind the point; "" for one that is shorter, or unknown."""
    return "" if us is None or us < _SHORTEST_US else f"{us / 1e3:.2f}"


def _gb(size: int) -> str:
    return f"{size / 1e9:.1f}"


def _short(name: str) -> str:
    """Return a name without its first words, then without its middle, so that it fits on a line of a terminal."""
    while len(name) > _MOST_LETTERS and _DOTTED.fullmatch(name):
        name = name.partition(".")[2]
    return formats.name(name, _MOST_LETTERS)
