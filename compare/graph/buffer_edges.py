"""A graph's buffers as edges: from the kernel that wrote one last to each that reads it, from outside, to outside."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass

from .model import Buffer, FusionGraph


@dataclass(frozen=True)
class BufferEdge:
    """writer, reader: launch indices; None for what comes from outside, as an input, or goes there, as an output."""

    writer: int | None
    reader: int | None


def buffer_edges(graph: FusionGraph, buffer: Buffer) -> Iterator[BufferEdge]:
    """In launch order of the readers; none of a buffer that no kernel uses. A kernel that writes over what it reads
    reads what was there before it."""
    writers, readers = graph.producers.get(buffer.name, ()), graph.consumers.get(buffer.name, ())
    for reader in readers:
        earlier = bisect_left(writers, reader)
        yield BufferEdge(writers[earlier - 1] if earlier else None, reader)
    if writers and (buffer.role == "output" or not readers):
        yield BufferEdge(writers[-1], None)
