"""The edges of one buffer: from the kernels whose contents it has to each reader, or from and to the outside."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

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
        if written is None or written * at_least(kernel) >= buffer.bytes - buffer.padding:
            return
    if not writers or buffer.role in ("input", "constant"):
        yield None


def bytes_passed(graph: FusionGraph, edge: BufferEdge, buffer: str) -> int | None:
    """Return the most bytes that all launches of the reader read of what the writer wrote; None where it is unknown."""
    kernels = graph.kernels or ()
    assert edge.writer is not None and edge.reader is not None
    writer, reader = kernels[edge.writer], kernels[edge.reader]
    read, times = _accessed(reader.inputs, buffer), at_least(reader)
    if read is None or (reader.launches is None and not times):
        return None
    written = _accessed(writer.outputs, buffer)
    if written is None or writer.launches is None:
        return read * times
    return min(read * times, written * max(times, writer.launches))


def at_least(kernel: Kernel) -> int:
    """Return the kernel's launches; the fewest where their number depends on data."""
    return kernel.least_launches if kernel.launches is None else kernel.launches


def _accessed(accesses: Iterable[Access] | None, buffer: str) -> int | None:
    """Return the bytes of a buffer that one launch reads or writes; None where they are unknown."""
    sizes = [access.bytes for access in accesses or () if access.buffer == buffer]
    return None if None in sizes else sum(size for size in sizes if size is not None)
