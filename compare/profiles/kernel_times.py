"""The measured times of kernels over the steps of a profile, and how far they are above the roofline."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..graph.alike import work_of
from ..graph.analyse.roofline import Ceilings, recoverable_us, roofline_time_us
from ..graph.model import FusionGraph
from .host_parts import HostPart, host_parts
from .join import Joined, Owner
from .steps import ProfiledStep


@dataclass(frozen=True)
class Times:
    """Microseconds: the sum of all samples, their median, the least and the most."""

    total: float
    median: float
    least: float
    most: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Times:
        return cls(sum(samples), statistics.median(samples), min(samples), max(samples))

    @classmethod
    def sum(cls, times: Iterable[Times]) -> Times:
        """Return the times of kernels together: no step took less than the sum of the least, nor more than the most."""
        found = list(times)
        return cls(
            sum(each.total for each in found), sum(each.median for each in found), sum(each.least for each in found),
            sum(each.most for each in found),
        )

    def to_json(self) -> dict[str, float]:
        return {"total": self.total, "median": self.median, "min": self.least, "max": self.most}


@dataclass(frozen=True)
class Helper:
    """A kernel, memset or copy that a library call runs besides its main kernel. step: of its launches in a step."""

    name: str
    launches: int
    step: Times


@dataclass(frozen=True)
class KernelTimes:
    """Kernels of one name and grid that do the same work, such as one in each layer.

    name: as the profiler shows it. grid: None where it is unknown. graph, kernels: the graph's kernels that they are.
    host_ops: operations of PyTorch that launched them. host_functions: functions of the program that did.
    host_part: of kernels without a graph, and of a compiled optimizer's; empty for others.
    launches: in a median step. step: times of a step, with those of `helpers`. launch: times of a launch, without them.
    roofline_us: of a step.
    """

    name: str
    grid: tuple[int, ...] | None
    graph: str
    kernels: tuple[int, ...]
    host_ops: tuple[str, ...]
    host_functions: tuple[str, ...]
    host_part: HostPart
    launches: int
    step: Times
    launch: Times
    helpers: tuple[Helper, ...]
    roofline_us: float | None

    @property
    def above_roofline_us(self) -> float | None:
        return recoverable_us(self.step.median, self.roofline_us)


def kernel_times(
    steps: Sequence[ProfiledStep], joined: Joined, ceilings: Mapping[str, Ceilings | None]
) -> list[KernelTimes]:
    """Return the kernels of all steps, those that take most time first. ceilings: by the graph's name."""
    main = _main_kernels(steps, joined)
    alike: dict[tuple[object, ...], _Samples] = {}
    for number, (step, owners) in enumerate(zip(steps, joined.owners, strict=True)):
        for event, owner, part in zip(step.events, owners, host_parts(step.events), strict=True):
            name, grid = (event.name, event.grid) if owner is None else main[owner]
            if owner is not None and part.phase != "update":
                part = HostPart()
            key: tuple[object, ...] = (event.module, event.operation, name, grid, part)
            if owner is not None:
                key = (owner[0], name, grid, part, *work_of(joined.graphs[owner[0]], owner[1]))
            samples = alike.setdefault(key, _Samples(name, grid, owner[0] if owner else "", part))
            samples.by_name.setdefault(event.name, [[] for _ in steps])[number].append(event.seconds * 1e6)
            if owner is not None:
                samples.kernels[owner[1]] = None
            if event.host_op:
                samples.host_ops[event.host_op] = None
            if event.host_function:
                samples.host_functions[event.host_function] = None
    found = []
    for samples in alike.values():
        graph = joined.graphs.get(samples.graph)
        roofline = None if graph is None else _roofline(
            graph, list(samples.kernels), joined.calls[samples.graph], ceilings.get(samples.graph)
        )
        found.append(samples.times(roofline))
    return sorted(found, key=lambda each: -each.step.median)


def _main_kernels(steps: Sequence[ProfiledStep], joined: Joined) -> dict[Owner, tuple[str, tuple[int, ...] | None]]:
    """Return the name and grid on which each graph kernel spends most time: a library call runs several kernels."""
    seconds: dict[Owner, dict[tuple[str, tuple[int, ...] | None], float]] = {}
    for step, owners in zip(steps, joined.owners, strict=True):
        for event, owner in zip(step.events, owners, strict=True):
            if owner is not None:
                of_owner = seconds.setdefault(owner, {})
                of_owner[event.name, event.grid] = of_owner.get((event.name, event.grid), 0.0) + event.seconds
    return {owner: max(found, key=found.__getitem__) for owner, found in seconds.items()}


class _Samples:
    """The launches of alike kernels and of their helpers in us, by name and step."""

    def __init__(self, name: str, grid: tuple[int, ...] | None, graph: str, part: HostPart) -> None:
        self._name = name
        self._grid = grid
        self._part = part
        self.graph = graph
        self.kernels: dict[int, None] = {}
        self.host_ops: dict[str, None] = {}
        self.host_functions: dict[str, None] = {}
        self.by_name: dict[str, list[list[float]]] = {}

    def times(self, roofline: float | None) -> KernelTimes:
        own = self.by_name[self._name]
        helpers = [
            Helper(name, _launches(found), Times.of(list(map(sum, found))))
            for name, found in self.by_name.items() if name != self._name
        ]
        helpers.sort(key=lambda each: -each.step.total)
        totals = [sum(map(sum, of_step)) for of_step in zip(*self.by_name.values(), strict=True)]
        return KernelTimes(
            self._name, self._grid, self.graph, tuple(self.kernels), tuple(self.host_ops), tuple(self.host_functions),
            self._part, _launches(own), Times.of(totals), Times.of([time for each in own for time in each]),
            tuple(helpers), roofline,
        )


def _launches(by_step: Sequence[Sequence[float]]) -> int:
    return round(statistics.median(map(len, by_step)))


def _roofline(graph: FusionGraph, kernels: Sequence[int], calls: int, ceilings: Ceilings | None) -> float | None:
    if ceilings is None:
        return None
    times = [roofline_time_us(graph, (graph.kernels or ())[index], ceilings) for index in kernels]
    known = [time for time in times if time is not None]
    return sum(known) * calls if len(known) == len(times) else None
