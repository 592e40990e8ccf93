"""What a record keeps of its fusion graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from compare.archive import relative
from compare.graph.model import FusionGraph, Kernel, SourceOp


def summary(graph: FusionGraph, parts: Iterable[str]) -> dict[str, dict[str, Any]]:
    """`Record.kernels`; nothing where the graph has operations and no kernels."""
    if graph.kernels is None:
        return {}
    result: dict[str, dict[str, Any]] = {}
    for part in parts:
        kernels = [kernel for kernel in graph.kernels if kernel.part == part]
        result[part] = {
            "launches": _sum(kernel.launches for kernel in kernels),
            "bytes_moved": _sum(map(_bytes_moved, kernels)),
            "provenance": dict(Counter(kernel.provenance for kernel in kernels)),
        }
    return result


def _bytes_moved(kernel: Kernel) -> int | None:
    read, written, launches = kernel.bytes_read, kernel.bytes_written, kernel.launches
    return None if read is None or written is None or launches is None else (read + written) * launches


def _sum(values: Iterable[int | None]) -> int | None:
    """The sum, or None where one is missing."""
    known = list(values)
    return None if None in known else sum(value for value in known if value is not None)


def portable_lines(graph: FusionGraph) -> FusionGraph:
    """The graph with source files relative to the project, or to the packages of its environment, so that it reads the
    same on any machine; frames of this harness are no source of the user's and go."""

    def shorten(op: SourceOp) -> SourceOp:
        line = relative(op.line)
        return replace(op, line="" if line.startswith("compare/") else line)

    kernels = None
    if graph.kernels is not None:
        kernels = tuple(replace(k, source_ops=tuple(map(shorten, k.source_ops))) for k in graph.kernels)
    return replace(graph, kernels=kernels, operations=tuple(map(shorten, graph.operations)))
