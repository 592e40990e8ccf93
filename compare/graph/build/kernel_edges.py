"""The edges between kernels, the most that fusing across each would save, and the edges at products and libraries."""

from __future__ import annotations

from dataclasses import dataclass

from ..buffer_edges import BufferEdge, buffer_edges, bytes_passed, written_for
from ..model import FusionGraph, Kernel, Reason


@dataclass(frozen=True)
class KernelEdge:
    """A kernel and a reader of its results, by launch index, and the buffers that pass between them."""

    producer: int
    consumer: int
    buffers: tuple[str, ...]


def kernel_edges(graph: FusionGraph) -> list[KernelEdge]:
    """Return the edges in launch order.

    An edge lies within one phase: forward and backward are compiled separately, and `graph.saved` lists their
    residuals. A value that one loop iteration passes to the next is no edge.
    """
    kernels = graph.kernels or ()
    between: dict[tuple[int, int], list[str]] = {}
    for buffer in graph.buffers:
        for edge in buffer_edges(graph, buffer):
            if edge.writer is not None and edge.reader is not None:
                if kernels[edge.writer].phase == kernels[edge.reader].phase:
                    between.setdefault((edge.reader, edge.writer), []).append(buffer.name)
    return [KernelEdge(producer, consumer, tuple(names)) for (consumer, producer), names in sorted(between.items())]


def bytes_saved(graph: FusionGraph, edge: KernelEdge) -> int | None:
    """Return the most bytes of a call that fusing the two kernels would save; None where they are unknown.

    These are the consumer's reads of what the producer wrote, and the producer's writes of buffers with no other use. A
    sort of an unknown number of launches reads and writes these buffers once.
    """
    amounts: list[int | None] = []
    for name in edge.buffers:
        amounts.append(bytes_passed(graph, BufferEdge(edge.producer, edge.consumer), name))
        amounts.append(written_for(graph, name, edge.producer, (edge.consumer,)))
    return None if None in amounts else sum(amount or 0 for amount in amounts)


def barrier(graph: FusionGraph, edge: KernelEdge) -> Reason | None:
    """Return a reason if one side of the edge is a product or library call, the producer first; else None."""
    kernels = graph.kernels or ()
    producer, consumer = kernels[edge.producer], kernels[edge.consumer]
    for kernel in (producer, consumer):
        if (code := barrier_code(kernel)) is not None:
            what = "a matrix product" if code == "gemm" else "a library call"
            text = f"{kernel.name} is {what}"
            return Reason(producer.name, consumer.name, code, text, "inferred", bytes_saved(graph, edge))
    return None


def barrier_code(kernel: Kernel) -> str | None:
    """Return "gemm" or "library", or None where a compiler may fuse into the kernel."""
    if kernel.kind == "gemm":
        return "gemm"
    called = kernel.kind == "scatter" and kernel.facts.get("extern")
    return "library" if called or kernel.kind in ("attention", "library", "collective") else None
