"""A user's step in the terms of its author: parts, phases, layers, and the rate of the model's own work."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from ..graph.model import FusionGraph, StepPhase
from ..profiles.steps import device_seconds
from ..sources.profiled import ProfiledSteps
from ..sources.source import Source
from .groups import Group, groups
from .outside import in_profile
from .parts import Part, Piece, layers_of, parts, pieces, time_by_phase
from .places import Place, Sources, parse, sources_beside

_MOST_NAMES = 4  # of parts in a group's name


@dataclass(frozen=True)
class Step:
    """The kernels of a step by parts of the model.

    graphs: of its compiled programs. sources: the user's files. profile: which also has what ran outside of the graphs.
    """

    graphs: Mapping[str, FusionGraph]
    sources: Sources
    profile: ProfiledSteps | None = None

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

    @property
    def by_phase(self) -> dict[StepPhase, float]:
        return time_by_phase(self.pieces)

    @cached_property
    def layers(self) -> int:
        return layers_of(self.parts)

    @property
    def device_us(self) -> float | None:
        """Time of a median step on the device, from its first kernel to its last; None without a profile."""
        if self.profile is None:
            return None
        return statistics.median(device_seconds(step.events) for step in self.profile.steps) * 1e6

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
        """Return the names of a group's longest parts, each once."""
        found = list(dict.fromkeys(map(self.name, group.parts)))
        more = len(found) - _MOST_NAMES
        return found if more <= 0 else [*found[:_MOST_NAMES], f"{more} more"]

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
    return Step(graphs, sources_beside(source.path), source.profile)


def step_of_profile(profile: ProfiledSteps) -> Step:
    """Return the step of a profile with all its graphs."""
    return Step(profile.joined.graphs, sources_beside(profile.path), profile)


def _lines(places: list[Place]) -> Iterator[str]:
    by_file: dict[str, list[int]] = {}
    for place in places:
        by_file.setdefault(Path(place.file).name, []).append(place.line)
    for file, lines in by_file.items():
        yield f"{file}:{', '.join(map(str, sorted(set(lines))))}"
