"""The edges of one buffer: from the kernel that wrote it last to each reader, or from and to the outside."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass

from .model import Buffer, FusionGraph


@dataclass(frozen=True)
class BufferEdge:
    """writer, reader: launch indices; None for an input's source and an output's target."""

    writer: int | None
    reader: int | None


def buffer_edges(graph: FusionGraph, buffer: Buffer) -> Iterator[BufferEdge]:
    """Yield the edges of a buffer in launch order of its readers; none if no kernel uses it.

    A kernel that overwrites its input reads the earlier contents.
    """
    writers, readers = graph.producers.get(buffer.name, ()), graph.consumers.get(buffer.name, ())
    for reader in readers:
        earlier = bisect_left(writers, reader)
        yield BufferEdge(writers[earlier - 1] if earlier else None, reader)
    if writers and (buffer.role == "output" or not readers):
        yield BufferEdge(writers[-1], None)
