"""A user's step in the terms of its author: parts, phases, layers, and the rate of the model's own work."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from xlafuse.hlo.text_reader import Module

from ..graph.model import FusionGraph, StepPhase
from ..profiles.steps import ProfiledStep, device_seconds, gaps
from ..sources.profiled import ProfiledSteps
from ..sources.source import Source
from .groups import Group, groups
from .memory import Memory, memory
from .outside import in_profile
from .parts import Part, Piece, layers_of, parts, pieces, time_by_phase
from .places import Place, Sources, parse, sources_beside


@dataclass(frozen=True)
class Step:
    """The kernels of a step by parts of the model.

    graphs: of its compiled programs, with predicted times where nothing was measured. sources: the user's files.
    profile: which also has what ran outside of the graphs. readers: return what graphs are made of, an HLO module or
    what Inductor wrote, by the graph's name.
    """

    graphs: Mapping[str, FusionGraph]
    sources: Sources
    profile: ProfiledSteps | None = None
    readers: Mapping[str, Callable[[], Any]] = field(default_factory=dict)

    @cached_property
    def programs(self) -> dict[str, Any]:
        """The HLO modules, or what Inductor wrote, of the graphs of which a path has them."""
        return {name: read() for name, read in self.readers.items()}

    @cached_property
    def pieces(self) -> list[Piece]:
        """The kernels, each with its part and phase."""
        return pieces(self.graphs) if self.profile is None else in_profile(pieces(self.graphs), self.profile)

    @cached_property
    def parts(self) -> list[Part]:
        """The parts, the longest first."""
        return parts(self.pieces)

    @cached_property
    def groups(self) -> list[Group]:
        """The parts in a dozen lines, the longest first."""
        return groups(self.parts, self.sources)

    @property
    def time_us(self) -> float:
        """Device time of all kernels."""
        return sum(part.time_us for part in self.parts)

    @cached_property
    def predicted(self) -> bool:
        """Return whether its times are predictions, because nothing of it was measured."""
        return any(piece.kernel.predicted is not None for piece in self.pieces)

    @property
    def by_phase(self) -> dict[StepPhase, float]:
        return time_by_phase(self.pieces)

    @cached_property
    def layers(self) -> int:
        return layers_of(self.parts)

    @cached_property
    def largest(self) -> str:
        """The name of the graph with the most memory; "" without graphs with kernels."""
        return max(self.memory, key=lambda name: self.memory[name].bytes, default="")

    @cached_property
    def memory(self) -> dict[str, Memory]:
        """The most memory of each graph with kernels."""
        return {
            name: memory(graph, self.keys(name), donated=self.donated(name))
            for name, graph in self.graphs.items() if graph.kernels
        }

    def donated(self, graph: str) -> int:
        """Return the bytes of a program's arguments whose memory its results take."""
        program = self.programs.get(graph)
        return program.bytes_donated() if isinstance(program, Module) else 0

    @property
    def donatable_bytes(self) -> int:
        """Bytes of the largest program's arguments that it could donate: results of the same shapes replace them.

        Only for a program that updates a model: another one's arguments may be used again.
        """
        graph = self.graphs.get(self.largest)
        updates = any(piece.phase == "update" and piece.graph == self.largest for piece in self.pieces)
        if graph is None or not updates or not isinstance(self.programs.get(self.largest), Module):
            return 0
        arrays = [(each.role, (each.shape, each.dtype), each.bytes) for each in graph.buffers if not each.space]
        given, made = (Counter(kind for own, kind, _ in arrays if own == role) for role in ("input", "output"))
        size = {kind: count for _, kind, count in arrays}
        return max(0, sum(size[kind] * count for kind, count in (given & made).items()) - self.donated(self.largest))

    @property
    def at_the_peak(self) -> Mapping[str, int]:
        """Bytes between kernels when the largest program takes the most memory, by the part that wrote them."""
        return self.memory[self.largest].between if self.largest else {}

    def keys(self, graph: str) -> list[str]:
        """Return the parts of a graph's kernels, in launch order."""
        by_index = {piece.index: piece.key for piece in self.pieces if piece.graph == graph}
        return [by_index[index] for index in sorted(by_index)]

    @property
    def device_us(self) -> float | None:
        """Time of a median step on the device, from its first kernel to its last; None without a profile."""
        if self.profile is None:
            return None
        return statistics.median(device_seconds(step.events) for step in self.profile.steps) * 1e6

    @property
    def idle_us(self) -> float:
        """Time of a median step in which no kernel runs; 0 without a profile."""
        steps = () if self.profile is None else self.profile.steps
        idle = [sum(gap.seconds for gap in gaps(step.events)) for step in steps]
        return statistics.median(idle) * 1e6 if idle else 0.0

    @property
    def wait_us(self) -> float:
        """Time in which the GPU waits between two steps, from the last kernel to the next one; 0 for a single step."""
        return self._median_wait([next_step.events[0].start for next_step in self._later_steps])

    @property
    def before_call_us(self) -> float:
        """The part of `wait_us` before the host calls the next step's program; 0 where the profile has no calls."""
        calls = [next_step.called for next_step in self._later_steps]
        return min(self.wait_us, self._median_wait([called for called in calls if called is not None]))

    @property
    def program(self) -> str:
        """The compiled function that a step calls first; "" where the profile does not say."""
        return next((step.program for step in self._later_steps), "")

    @property
    def _later_steps(self) -> Sequence[ProfiledStep]:
        return () if self.profile is None else self.profile.steps[1:]

    def _median_wait(self, times: Sequence[float]) -> float:
        """Return the microseconds from the end of each step but the last to these times of the next ones."""
        steps = () if self.profile is None or len(times) < len(self._later_steps) else self.profile.steps
        waits = [
            time - max(event.end for event in step.events) for step, time in zip(steps, times, strict=False)
        ]
        return max(0.0, statistics.median(waits)) * 1e6 if waits else 0.0

    @property
    def device(self) -> str:
        """The name of the GPU that ran it, or that it was compiled for; "" where it is unknown."""
        if self.profile is not None:
            return self.profile.profile.device
        return next((graph.target for graph in self.graphs.values()), "")

    def name(self, part: Part) -> str:
        """Return what the user's code calls a part; its named scope where it has one; "no part known" for neither."""
        place = parse(part.key)
        return self.sources.label(place) if place is not None else part.key or "no part known"

    def names(self, group: Group) -> list[str]:
        """Return the names of a group's parts, each once, those of the longest first."""
        return list(dict.fromkeys(map(self.name, group.parts)))

    def where(self, group: Group) -> str:
        """Return the lines of a group's parts: "train.py:7, 8"; "" where none has a place."""
        return self.where_of(group.parts)

    def where_of(self, parts: Iterable[Part]) -> str:
        """Return the same of parts."""
        return ", ".join(_lines([place for part in parts if (place := parse(part.key)) is not None]))


def step_of(source: Source) -> Step:
    """Return the step of a source, with the user's files.

    A capture has copies of them. For another path they are looked for beside it and in the current folder.
    """
    graphs = {result.id: result.graph for result in source.results if result.graph is not None}
    if source.profile is None and not any(graph.measured for graph in graphs.values()):
        graphs = {result.id: graph for result in source.results if (graph := result.predicted_graph) is not None}
    readers = {result.id: result.program for result in source.results if result.program and result.graph is not None}
    return Step(graphs, sources_beside(source.path), source.profile, readers)


def step_of_profile(profile: ProfiledSteps) -> Step:
    """Return the step of a profile with all its graphs."""
    return Step(profile.joined.graphs, sources_beside(profile.path), profile)


def _lines(places: list[Place]) -> Iterator[str]:
    by_file: dict[str, list[int]] = {}
    for place in places:
        by_file.setdefault(Path(place.file).name, []).append(place.line)
    for file, lines in by_file.items():
        yield f"{file}:{', '.join(map(str, sorted(set(lines))))}"
