"""Kernels that do the same work, such as those of one operation in every layer."""

from __future__ import annotations

import re

from .model import FusionGraph

_NUMBER = re.compile(r"\d+")


def any_layer(stage: str) -> str:
    """Return a stage without the layer's number: "layer*/attention" for "layer3/attention"."""
    return _NUMBER.sub("*", stage)


def work_of(graph: FusionGraph, index: int) -> tuple[object, ...]:
    """Return the work of a kernel, which is equal for that of another layer; unique where it has no operations."""
    kernel = (graph.kernels or ())[index]
    operations = tuple((op.op, any_layer(op.stage), op.line, op.backward) for op in kernel.source_ops)
    if not operations:
        return (index,)
    return kernel.phase, kernel.kind, kernel.bytes_read, kernel.bytes_written, kernel.flops, operations


def first_alike(graph: FusionGraph) -> list[int]:
    """Return for each kernel the first one that does the same work: its own index where there is none before it."""
    first: dict[tuple[object, ...], int] = {}
    return [first.setdefault(work_of(graph, index), index) for index in range(len(graph.kernels or ()))]
