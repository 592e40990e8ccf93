"""The data from which `static/drawing.js` draws a case's fusion graphs side by side.

Stages are bands, implementations are columns, and a kernel is a box over the bands whose operations it computes. This
folder chooses the bands and writes the texts; `static/drawing-layout.js` places the boxes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ....base.text import printable
from ....base.usage import UsageError
from ....graph import formats
from ....graph.alike import first_alike
from ....graph.analyse.align import Alignment, align
from ....graph.analyse.missed_fusions import missed
from ....graph.analyse.products import described
from ....graph.analyse.totals import declared_bytes, tally
from ....graph.buffer_edges import buffer_edges
from ....graph.model import FusionGraph
from ....sources.case_results import BASELINES
from ....sources.result import Result
from ....spec.block import MAIN_IMPLEMENTATIONS
from .bands import Band, computed
from .bands import of_graphs as bands_of
from .boxes import buffers, bytes_of, costs, operations

SHOWN_FIRST = 5  # columns that fit a screen
MOST_KERNELS = 2000  # in a column; a browser lays them out in a second
MOST_TEXT = 400  # characters of a compiler's reason


def of_case(sources: Iterable[Result]) -> dict[str, Any] | None:
    """Return the drawing's data; None if no graph has a kernel or an operation.

    sources: a case's records with a graph. `_rank` has the order of their columns. A graph that cannot be read has no
    column; its reason is in `unread`.
    """
    read: list[tuple[Result, FusionGraph]] = []
    unread: list[dict[str, str]] = []
    for source in sorted(sources, key=_rank):
        try:
            graph = source.load()
            graph = source.timed_graph or graph
            if (count := len(graph.kernels or ())) > MOST_KERNELS:
                raise UsageError(f"{count:,} kernels are too many to draw; `xlafuse inspect` lists them")
            read.append((source, graph))
        except UsageError as problem:
            unread.append({"name": _implementation(source), "why": printable(str(problem))})
    graphs = [graph for _, graph in read]
    if not any(graph.kernels or graph.operations for graph in graphs):
        return {"unread": unread, "bands": [], "columns": [], "shown": []} if unread else None
    alignment = align(graphs)
    bands = bands_of(graphs, alignment)
    return {
        "bands": [{"label": formats.name(band.label, 60), "phase": band.phase} for band in bands],
        "inferred": any(row.inferred for row in alignment.rows),
        "columns": [_column(i, source, graph, alignment, bands) for i, (source, graph) in enumerate(read)],
        "shown": _shown([source for source, _ in read]),
        "unread": unread,
    }


def _rank(source: Result) -> tuple[bool, int, float]:
    """Return the key of the order of columns: the main ones, then others from fastest to slowest, then baselines."""
    name = _implementation(source)
    time = source.time_us
    main = MAIN_IMPLEMENTATIONS
    return name in BASELINES, main.index(name) if name in main else len(main), time or float("inf")


def _shown(sources: Sequence[Result]) -> list[int]:
    """Return the columns that are visible at first. Baselines are visible only if there is nothing else."""
    compared = [i for i, source in enumerate(sources) if _implementation(source) not in BASELINES]
    return (compared or list(range(len(sources))))[:SHOWN_FIRST]


def _implementation(source: Result) -> str:
    return printable(source.name, 80)


def _bands_of_kernels(
    column: int, graph: FusionGraph, alignment: Alignment, bands: Sequence[Band]
) -> list[list[int]]:
    """Return the bands in which each kernel computes, in launch order.

    If no kernel of a phase names a stage, none of them has bands; they are drawn next to the bands, in launch order.
    """
    kernels = graph.kernels or ()
    of_kernels: list[list[int]] = [[] for _ in kernels]
    for number, band in enumerate(bands):
        if band.row is not None:
            for index in alignment.rows[band.row].cells[column].kernels or ():
                of_kernels[index].append(number)
    staged = {kernel.phase for kernel, numbers in zip(kernels, of_kernels, strict=True) if numbers}
    return [
        computed(kernel, numbers, bands) if numbers or kernel.phase not in staged
        else [i for i, band in enumerate(bands) if band.row is None and band.phase == kernel.phase]
        for kernel, numbers in zip(kernels, of_kernels, strict=True)
    ]


def _column(
    column: int, source: Result, graph: FusionGraph, alignment: Alignment, bands: Sequence[Band]
) -> dict[str, Any]:
    kernels, of_kernels = graph.kernels or (), _bands_of_kernels(column, graph, alignment, bands)
    order = {buffer.name: i for i, buffer in enumerate(graph.buffers)}
    declared = tally(map(declared_bytes, kernels)).exact
    time = tally(kernel.device_time_us if graph.measured else kernel.predicted_us for kernel in kernels).exact
    products, first = described(graph), first_alike(graph)
    limits, _ = source.priced_for(None)
    boxes = [
        {
            **costs(graph, kernel, limits, declared, time, order, products.get(index)),
            "ops": operations(kernel, numbers, bands),
            "in": bytes_of(graph, kernel.inputs, ("input", "constant")),
            "out": bytes_of(graph, kernel.outputs, ("output",)),
            "same": first[index], "times": first.count(index),
        }
        for index, (kernel, numbers) in enumerate(zip(kernels, of_kernels, strict=True))
    ]
    drawn, reasons = _edges(graph, order)
    return {
        "name": _implementation(source),
        "title": _title(source, graph, declared),
        "kernels": boxes,
        "buffers": buffers(graph),
        "edges": drawn,
        "reasons": reasons,
        "cells": [_cell(column, band, graph, alignment) for band in bands],
        "note": _note(graph),
    }


def _title(source: Result, graph: FusionGraph, declared: float | None) -> str:
    time, predicted = source.time_us, source.row.predicted
    words = [formats.count(len(graph.kernels), "kernel") if graph.kernels is not None else "kernels unknown"]
    words += [] if time is None else [formats.microseconds(time)]
    words += [] if predicted is None or predicted.us is None else [formats.predicted(predicted)]
    return " · ".join([*words, *([] if declared is None else [formats.size(declared)])])


def _note(graph: FusionGraph) -> str:
    if graph.kernels is not None:
        return ""
    return f"kernels unknown; operations: {formats.words(formats.operation(op) for op in graph.operations)}"[:4000]


def _edges(graph: FusionGraph, order: Mapping[str, int]) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the edges from writers of a buffer's contents to each reader, largest first, and reasons for not fusing.

    Edges refer to reasons by position.
    """
    kernels, by_pair = graph.kernels or (), _reasons_by_pair(graph)
    reasons: dict[str, int] = {}
    drawn: list[dict[str, Any]] = []
    for buffer in graph.buffers:
        for edge in buffer_edges(graph, buffer):
            if edge.writer is not None and edge.reader is not None:
                reasons_here = by_pair.get((kernels[edge.writer].name, kernels[edge.reader].name), [])
                drawn.append({
                    "from": edge.writer, "to": edge.reader, "buffer": order[buffer.name],
                    "why": [reasons.setdefault(words, len(reasons)) for words in reasons_here],
                })
    drawn.sort(key=lambda edge: -graph.buffers[edge["buffer"]].bytes)
    return drawn, list(reasons)


def _reasons_by_pair(graph: FusionGraph) -> Mapping[tuple[str, str], list[str]]:
    reasons: dict[tuple[str, str], dict[str, None]] = {}
    for reason in missed(graph):
        words = f"{reason.code}: {printable(reason.text, MOST_TEXT)} ({printable(reason.origin, 60)})"
        reasons.setdefault((reason.producer, reason.consumer), {})[words] = None
    return {pair: list(words)[:3] for pair, words in reasons.items()}


def _cell(column: int, band: Band, graph: FusionGraph, alignment: Alignment) -> str:
    """Return the kernels that compute the stage, and how they differ from the first column that computes it.

    compare.graph.analyse.align defines the differences.
    """
    if band.row is None:
        loose = alignment.unattributed[column]
        return _numbers(i for i in loose if (graph.kernels or ())[i].phase == band.phase)
    cell = alignment.rows[band.row].cells[column]
    if cell.kernels is None:
        return "kernels unknown"
    relations = ", ".join(word for word in cell.relations if word != "same region")
    return ": ".join(filter(None, (_numbers(cell.kernels), relations)))


def _numbers(kernels: Iterable[int]) -> str:
    listed = ", ".join(str(index + 1) for index in kernels)
    return f"in {listed}" if listed else ""
