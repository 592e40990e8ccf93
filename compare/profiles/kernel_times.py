"""The measured times of kernels over the steps of a profile, and how far they are above the roofline."""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..graph.analyse.roofline import Ceilings, recoverable_us, roofline_time_us
from ..graph.model import FusionGraph, Kernel
from .join import Joined
from .steps import ProfiledStep

_NUMBER = re.compile(r"\d+")


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

    def to_json(self) -> dict[str, float]:
        return {"total": self.total, "median": self.median, "min": self.least, "max": self.most}


@dataclass(frozen=True)
class KernelTimes:
    """Kernels that do the same work, such as one in each layer.

    name: of the one that takes most time, as the profiler shows it. graph, kernels: the graph's kernels that they are.
    host_ops: operations of PyTorch that launched them. launches: in a median step. step, launch: times of a step, and
    of a launch. roofline_us: of a step.
    """

    name: str
    graph: str
    kernels: tuple[int, ...]
    host_ops: tuple[str, ...]
    launches: int
    step: Times
    launch: Times
    roofline_us: float | None

    @property
    def above_roofline_us(self) -> float | None:
        return recoverable_us(self.step.median, self.roofline_us)


def kernel_times(
    steps: Sequence[ProfiledStep], joined: Joined, ceilings: Mapping[str, Ceilings | None]
) -> list[KernelTimes]:
    """Return the kernels of all steps, those that take most time first. ceilings: by the graph's name."""
    alike: dict[tuple[object, ...], _Samples] = {}
    for number, (step, owners) in enumerate(zip(steps, joined.owners, strict=True)):
        for event, owner in zip(step.events, owners, strict=True):
            if owner is None:
                key: tuple[object, ...] = (event.module, event.operation, event.name)
            else:
                key = (owner[0], *_work(joined.graphs[owner[0]].kernels or (), owner[1]))
            samples = alike.setdefault(key, _Samples(owner[0] if owner else "", len(steps)))
            samples.steps[number].append(event.seconds * 1e6)
            samples.names[event.name] = samples.names.get(event.name, 0.0) + event.seconds
            if owner is not None:
                samples.kernels[owner[1]] = None
            if event.host_op:
                samples.host_ops[event.host_op] = None
    found = []
    for samples in alike.values():
        graph = joined.graphs.get(samples.graph)
        roofline = None if graph is None else _roofline(
            graph, list(samples.kernels), joined.calls[samples.graph], ceilings.get(samples.graph)
        )
        name = max(samples.names, key=samples.names.__getitem__)
        found.append(KernelTimes(
            name, samples.graph, tuple(samples.kernels), tuple(samples.host_ops),
            round(statistics.median(map(len, samples.steps))), Times.of(list(map(sum, samples.steps))),
            Times.of([time for each in samples.steps for time in each]), roofline,
        ))
    return sorted(found, key=lambda each: -each.step.median)


class _Samples:
    """The launches of alike kernels in us, by step."""

    def __init__(self, graph: str, steps: int) -> None:
        self.names: dict[str, float] = {}  # a library call runs several kernels
        self.graph = graph
        self.kernels: dict[int, None] = {}
        self.host_ops: dict[str, None] = {}
        self.steps: list[list[float]] = [[] for _ in range(steps)]


def _work(kernels: Sequence[Kernel], index: int) -> tuple[object, ...]:
    """Return the work of a kernel, which is equal for that of another layer."""
    kernel = kernels[index]
    operations = tuple((op.op, _NUMBER.sub("", op.stage), op.line, op.backward) for op in kernel.source_ops)
    if not operations:
        return (index,)
    return kernel.phase, kernel.kind, kernel.bytes_read, kernel.bytes_written, kernel.flops, operations


def _roofline(graph: FusionGraph, kernels: Sequence[int], calls: int, ceilings: Ceilings | None) -> float | None:
    if ceilings is None:
        return None
    times = [roofline_time_us(graph, (graph.kernels or ())[index], ceilings) for index in kernels]
    known = [time for time in times if time is not None]
    return sum(known) * calls if len(known) == len(times) else None
