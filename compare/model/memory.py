"""Device memory that the buffers of a compiled program take, launch by launch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..graph.model import FusionGraph

_WHOLE_CALL = ("input", "output", "constant")  # roles of buffers that exist before or after the call


@dataclass(frozen=True)
class Memory:
    """The most memory that a program takes at one time, in bytes.

    arguments, results: they exist during the whole call; a result in the memory of a donated argument counts once.
    kernel: the index of the launch with the most memory. between: buffers between kernels that exist then, by the part
    whose kernel wrote them, with that launch's workspace.
    """

    arguments: int
    results: int
    kernel: int
    between: Mapping[str, int]

    @property
    def bytes(self) -> int:
        return self.arguments + self.results + sum(self.between.values())


def memory(
    graph: FusionGraph, keys: Sequence[str], *, donated: int = 0, without: Collection[str] = (),
    early: Collection[str] = (), since: int = 0,
) -> Memory:
    """Return the most memory of a graph, whose kernels have these parts.

    A buffer exists from the launch that writes it to the last that reads it. A kernel writes to the memory of an
    operand of the same size that no later kernel reads. donated: bytes of results that take the memory of arguments.
    without: buffers that a change to the program removes. early: buffers that exist from launch `since` on.

    Buffers between kernels and results together are 1.00 of what XLA plans in the median of 699 programs that it
    compiled for an H200, and 0.84 to 1.16 from the 10th to the 90th percentile.
    """
    kernels = graph.kernels or ()
    most, peak, at = -1, list[str](), 0
    for index, exists in enumerate(_existing(graph, without, early, since)):
        now = sum(graph.buffer[name].bytes for name in exists) + kernels[index].workspace_bytes
        if now > most:
            most, peak, at = now, exists, index
    between: dict[str, int] = {}
    if kernels and (workspace := kernels[at].workspace_bytes):
        between[keys[at]] = workspace
    for name in peak:
        key = keys[graph.producers[name][0]]
        between[key] = between.get(key, 0) + graph.buffer[name].bytes
    arguments, results = (
        sum(buffer.bytes for buffer in graph.buffers if buffer.role in roles and not buffer.space)
        for roles in (("input", "constant"), ("output",))
    )
    return Memory(arguments, max(0, results - donated), at, dict(sorted(between.items(), key=lambda item: -item[1])))


def _existing(
    graph: FusionGraph, without: Collection[str], early: Collection[str], since: int
) -> Iterator[list[str]]:
    """Yield the buffers between kernels that exist during each launch."""
    begins: dict[int, list[str]] = {}
    last: dict[str, int] = {}
    for name, writers in graph.producers.items():
        buffer = graph.buffer.get(name)
        if buffer is not None and buffer.role not in _WHOLE_CALL and not buffer.space and name not in without:
            begins.setdefault(min(writers[0], since) if name in early else writers[0], []).append(name)
            last[name] = max((*writers, *graph.consumers.get(name, ())))
    exists: dict[str, None] = {}
    for index in range(len(graph.kernels or ())):
        made = begins.get(index, [])
        ending = [name for name in exists if last[name] == index]
        exists |= dict.fromkeys(made)
        reusable = Counter(graph.buffer[name].bytes for name in made)
        reused = set()
        for name in ending:
            if reusable[graph.buffer[name].bytes] > 0:
                reusable[graph.buffer[name].bytes] -= 1
                reused.add(name)
        yield [name for name in exists if name not in reused]
        for name in [name for name in exists if last[name] <= index]:
            del exists[name]
