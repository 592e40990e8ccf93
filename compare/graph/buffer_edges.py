"""The edges of one buffer: from the kernels whose contents it has to each reader, or from and to the outside.

And how many bytes pass along an edge. In a loop, a kernel may read what an earlier one wrote in the first iteration
alone, because the loop overwrites it. `connected` groups what edges of any kind connect.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import TypeVar

from .model import Access, Buffer, FusionGraph, Kernel


@dataclass(frozen=True)
class BufferEdge:
    """writer, reader: launch indices; None for an input's source and an output's target."""

    writer: int | None
    reader: int | None


def buffer_edges(graph: FusionGraph, buffer: Buffer) -> Iterator[BufferEdge]:
    """Yield the edges of a buffer in launch order of its readers; none if no kernel uses it.

    A kernel that overwrites its input reads the earlier contents. A kernel that writes a part of the buffer leaves the
    rest as it was, so a reader may have edges from several writers, the last one first.
    """
    writers, readers = graph.producers.get(buffer.name, ()), graph.consumers.get(buffer.name, ())
    for reader in readers:
        earlier = writers[: bisect_left(writers, reader)]
        yield from (BufferEdge(writer, reader) for writer in _sources(graph, buffer, earlier))
    if writers and (buffer.role == "output" or not readers):
        yield BufferEdge(writers[-1], None)


def _sources(graph: FusionGraph, buffer: Buffer, writers: Sequence[int]) -> Iterator[int | None]:
    """Yield the writers whose contents the buffer has after these, the last one first; None for its first contents."""
    for writer in reversed(writers):
        yield writer
        kernel = (graph.kernels or ())[writer]
        written = _accessed(kernel.outputs, buffer.name)
        if written is None or written * max(1, kernel.certain_launches) >= buffer.bytes - buffer.padding:
            return
    if not writers or buffer.role in ("input", "constant"):
        yield None


def reads_of(graph: FusionGraph, name: str, writer: int, reader: int) -> int:
    """Return how many launches of the reader read what the writer wrote to a buffer; 0 where this is unknown.

    A loop that overwrites the buffer in each iteration reads the contents from before it once.
    """
    kernels = graph.kernels or ()
    around, outside = _around(kernels[reader]), _shared(kernels[writer], kernels[reader])
    once = [depth for depth in range(outside, len(around)) if _renews(graph, name, around[: depth + 1])]
    each = [iterations for depth, (_, iterations) in enumerate(around) if depth not in once]
    if once and None not in each:
        return math.prod(count for count in each if count is not None)
    return kernels[reader].certain_launches // math.prod(around[depth][1] or 1 for depth in once)


def bytes_passed(graph: FusionGraph, edge: BufferEdge, name: str) -> int | None:
    """Return the most bytes that all launches of the reader read of what the writer wrote; None where it is unknown."""
    kernels = graph.kernels or ()
    assert edge.writer is not None and edge.reader is not None
    writer, reader = kernels[edge.writer], kernels[edge.reader]
    read, times = _accessed(reader.inputs, name), reads_of(graph, name, edge.writer, edge.reader)
    if read is None or not (times or reader.launches == 0):
        return None
    written = _accessed(writer.outputs, name)
    if written is None or writer.launches is None:
        return read * times
    return min(read * times, written * max(times, writer.launches))


def _accessed(accesses: Iterable[Access] | None, name: str) -> int | None:
    """Return the bytes of a buffer that one launch reads or writes; None where they are unknown."""
    sizes = [access.bytes for access in accesses or () if access.buffer == name]
    return None if None in sizes else sum(size for size in sizes if size is not None)


def written_for(graph: FusionGraph, name: str, writer: int, readers: Collection[int]) -> int | None:
    """Return the bytes that the writer writes to a buffer for these readers alone; 0 if something else may read them.

    If a loop around the writer overwrites them and the readers are behind it, the last writes count. None if unknown.
    """
    if not set(_users(graph, name, writer)) <= set(readers):
        return 0
    kernels = graph.kernels or ()
    kernel = kernels[writer]
    sizes = [access.bytes for access in kernel.outputs or () if access.buffer == name]
    if None in sizes or (kernel.launches is None and not kernel.least_launches):
        return None
    total = sum(size for size in sizes if size is not None) * kernel.certain_launches
    around = _around(kernel)
    shared = around[: max((_shared(kernel, kernels[reader]) for reader in readers if reader != writer), default=0)]
    if len(shared) == len(around) or any(iterations is None for _, iterations in shared):
        return total
    return min(total, graph.buffer[name].bytes * math.prod(iterations or 0 for _, iterations in shared))


_Around = tuple[tuple[str, int | None], ...]


def _around(kernel: Kernel) -> _Around:
    """Return the loops and branches that hold a kernel, outermost first; none where the compiler does not tell."""
    return tuple((name, iterations) for name, iterations in kernel.facts.get("around", ()))


def _shared(one: Kernel, other: Kernel) -> int:
    """Return how many loops and branches hold both kernels."""
    if one.phase != other.phase:
        return 0
    pairs = zip(_around(one), _around(other), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _renews(graph: FusionGraph, name: str, loop: _Around) -> bool:
    """Return whether each iteration of a loop overwrites all of the buffer."""
    writers = ((graph.kernels or ())[index] for index in graph.producers[name])
    depth = len(loop)
    return any(_around(each)[:depth] == loop and _overwrites(graph, name, each, depth) for each in writers)


def _overwrites(graph: FusionGraph, name: str, kernel: Kernel, depth: int) -> bool:
    """Return whether a kernel overwrites all of a buffer, and runs for certain in each iteration at this depth."""
    around, size = _around(kernel), graph.buffer[name].bytes
    whole = any(access.buffer == name and (access.bytes or 0) >= size > 0 for access in kernel.outputs or ())
    return whole and bool(around or kernel.launches) and all(iterations for _, iterations in around[depth:])


def _users(graph: FusionGraph, name: str, writer: int) -> Iterator[int | None]:
    """Yield the later kernels that may read what the writer wrote to a buffer.

    None stands for others: the caller, or a later iteration of a loop that holds the writer.
    """
    kernels = graph.kernels or ()
    kernel, readers = kernels[writer], graph.consumers.get(name, ())
    touching = sorted({*readers, *graph.producers[name]})
    behind = [index for index in touching if index > writer]

    def follow(indices: Iterable[int]) -> Iterator[int | None]:
        """Yield the readers up to the first kernel that overwrites these contents; None at the end without one."""
        for index in indices:
            if index in readers:
                yield index
            if _overwrites(graph, name, kernels[index], _shared(kernel, kernels[index])):
                return
        yield None

    for index in follow(behind):
        if index is not None or graph.buffer[name].role != "intermediate":
            yield index
    for depth in range(len(_around(kernel)), 0, -1):
        inside = [index for index in touching if _shared(kernel, kernels[index]) >= depth]
        again = follow(sorted(inside, key=lambda index: (index <= writer, index)))
        if any(index is not None and index <= writer for index in again):
            yield None
    if kernel.launches != 1 and not _around(kernel) and any(index <= writer for index in readers):
        yield None  # perhaps in a loop, which the graph does not show


Node = TypeVar("Node", bound=Hashable)


def connected(pairs: Iterable[tuple[Node, Node]]) -> list[set[Node]]:
    """Return the groups of nodes that the pairs connect, in the order of their first nodes."""
    neighbours: dict[Node, set[Node]] = {}
    for one, other in pairs:
        neighbours.setdefault(one, set()).add(other)
        neighbours.setdefault(other, set()).add(one)
    groups = []
    while neighbours:
        members: set[Node] = set()
        waiting = {next(iter(neighbours))}
        while waiting:
            members.add(node := waiting.pop())
            waiting |= neighbours.pop(node) - members
        groups.append(members)
    return groups
