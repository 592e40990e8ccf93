"""The data from which `static/drawing.js` draws a case's fusion graphs side by side.

Stages are bands, implementations are columns, and a kernel is a box over the bands whose operations it computes. This
module chooses the boxes, their tracks and which are folded. The browser chooses the heights.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ....base.text import printable
from ....base.usage import UsageError
from ....graph import formats
from ....graph.analyse.align import Alignment, align
from ....graph.analyse.missed_fusions import missed
from ....graph.analyse.totals import declared_bytes, tally
from ....graph.buffer_edges import buffer_edges
from ....graph.model import PHASES, FusionGraph
from ....graph.render import text_view
from ....plan import paired_rounds
from ....sources.graph_sources import GraphSource
from ....spec.block import MAIN_IMPLEMENTATIONS
from ...run_results import BASELINES
from .bands import Band, computed, grouped
from .bands import of_graphs as bands_of
from .boxes import buffers, bytes_of, costs, operations
from .folding import folds, low_cost
from .tracks import pieces

SHOWN_FIRST = 5  # columns that fit a screen
MOST_KERNELS = 2000  # in a column; a browser lays them out in a second
MOST_TEXT = 400  # characters of a compiler's reason


def of_case(sources: Sequence[GraphSource]) -> dict[str, Any] | None:
    """Return the drawing's data; None if no graph has a kernel or an operation.

    sources: a case's records with a graph, in the order of the columns. A graph that cannot be read has no column; its
    reason is in `unread`.
    """
    read: list[tuple[GraphSource, FusionGraph]] = []
    unread: list[dict[str, str]] = []
    for each in sources:
        try:
            graph = each.graph()
        except UsageError as problem:
            unread.append({"name": _implementation(each), "why": printable(str(problem))})
            continue
        if len(graph.kernels or ()) > MOST_KERNELS:
            why = f"{len(graph.kernels or ()):,} kernels are too many to draw; `xlafuse inspect` lists them"
            unread.append({"name": _implementation(each), "why": why})
            continue
        read.append((each, graph))
    graphs = [graph for _, graph in read]
    if not any(graph.kernels or graph.operations for graph in graphs):
        return {"unread": unread, "bands": [], "columns": [], "layouts": [], "shown": []} if unread else None
    alignment = align(graphs)
    bands = bands_of(graphs, alignment)
    held = [_held(i, graph, alignment, bands) for i, graph in enumerate(graphs)]
    longest = max((k.device_time_us or 0 for graph in graphs for k in graph.kernels or ()), default=0)
    shown = _shown([each for each, _ in read])
    each_apart = [[number] for number in range(len(bands))]
    together = grouped(bands, [(graphs[i].kernels or (), held[i]) for i in shown])
    layouts = [each_apart] if together == each_apart else [together, each_apart]
    return {
        "bands": [{"label": formats.name(band.label, 60), "phase": band.phase} for band in bands],
        "inferred": any(row.inferred for row in alignment.rows),
        "columns": [
            _column(i, each, graph, alignment, bands, held[i], longest) for i, (each, graph) in enumerate(read)
        ],
        "layouts": [_layout(groups, graphs, held) for groups in layouts],
        "shown": shown,
        "unread": unread,
    }


def _layout(
    groups: list[list[int]], graphs: Sequence[FusionGraph], held: Sequence[Mapping[int, list[int]]]
) -> dict[str, Any]:
    """Return the boxes of each kernel ([track, first group, last group]) and the folded kernels, by column.

    groups: bands that are drawn as one. If bands are grouped, a kernel of little cost is only in the group that has
    most of its stages.
    """
    group = {band: number for number, bands in enumerate(groups) for band in bands}
    columns = []
    for graph, own in zip(graphs, held, strict=True):
        within = {index: [group[band] for band in bands] for index, bands in own.items()}
        if len(groups) < len(group):
            brief = {index: within[index] for index in low_cost(graph) if within[index]}
            within |= {index: [max(found, key=found.count)] for index, found in brief.items()}
        placed = pieces({index: sorted(set(found)) for index, found in within.items()})
        columns.append({
            "pieces": [[[piece.track, piece.first, piece.last] for piece in boxes] for boxes in placed.values()],
            "folds": folds(graph, placed),
        })
    return {"groups": groups, "columns": columns}


def ordered(sources: Iterable[GraphSource]) -> list[GraphSource]:
    """Return the columns in order: the main ones, then others from fastest to slowest, then baselines."""
    return sorted(sources, key=_rank)


def _rank(found: GraphSource) -> tuple[bool, int, float]:
    name = _implementation(found)
    time = paired_rounds.device_time_us(found.record) if found.record else None
    main = MAIN_IMPLEMENTATIONS
    return name in BASELINES, main.index(name) if name in main else len(main), time or float("inf")


def _shown(found: Sequence[GraphSource]) -> list[int]:
    """Return the columns that are visible at first. Baselines are visible only if there is nothing else."""
    order = sorted(range(len(found)), key=lambda i: _rank(found[i]))
    compared = [i for i in order if _implementation(found[i]) not in BASELINES]
    return sorted((compared or order)[:SHOWN_FIRST])


def _implementation(found: GraphSource) -> str:
    return printable(found.record.implementation if found.record else found.name, 80)


def _held(column: int, graph: FusionGraph, alignment: Alignment, bands: Sequence[Band]) -> dict[int, list[int]]:
    """Return the bands in which each kernel computes, by launch index.

    If no kernel of a phase names a stage, none of them has bands; they are drawn next to the bands, in launch order.
    """
    kernels = graph.kernels or ()
    held: dict[int, list[int]] = {index: [] for index in range(len(kernels))}
    for number, band in enumerate(bands):
        if band.row is not None:
            for index in alignment.rows[band.row].cells[column].kernels or ():
                held[index].append(number)
    held = {index: computed(kernels[index], numbers, bands) for index, numbers in held.items()}
    free = [phase for phase in PHASES if not any(held[i] for i, kernel in enumerate(kernels) if kernel.phase == phase)]
    for index, kernel in enumerate(kernels):
        if not held[index] and kernel.phase not in free:
            held[index] = [i for i, band in enumerate(bands) if band.row is None and band.phase == kernel.phase]
    return held


def _column(
    column: int, source: GraphSource, graph: FusionGraph, alignment: Alignment, bands: Sequence[Band],
    held: Mapping[int, list[int]], longest: float,
) -> dict[str, Any]:
    kernels = graph.kernels or ()
    order = {buffer.name: i for i, buffer in enumerate(graph.buffers)}
    declared = tally(map(declared_bytes, kernels)).exact
    time = tally(kernel.device_time_us for kernel in kernels).exact
    products = text_view.described_products(graph)
    limits, _ = source.ceilings_for(graph, None)
    boxes = [
        {
            **costs(graph, kernel, limits, declared, time, order, products.get(index)),
            "bar": round(kernel.device_time_us / longest, 3) if kernel.device_time_us and longest else 0,
            "ops": operations(kernel, held[index], bands),
            "in": bytes_of(graph, kernel.inputs, ("input", "constant")),
            "out": bytes_of(graph, kernel.outputs, ("output",)),
        }
        for index, kernel in enumerate(kernels)
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


def _title(source: GraphSource, graph: FusionGraph, declared: float | None) -> str:
    time = None if source.record is None else paired_rounds.device_time_us(source.record)
    words = [formats.count(len(graph.kernels), "kernel") if graph.kernels is not None else "kernels unknown"]
    words += [] if time is None else [formats.microseconds(time)]
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
    found: dict[tuple[str, str], dict[str, None]] = {}
    for reason in missed(graph):
        words = f"{reason.code}: {printable(reason.text, MOST_TEXT)} ({printable(reason.origin, 60)})"
        found.setdefault((reason.producer, reason.consumer), {})[words] = None
    return {pair: list(words)[:3] for pair, words in found.items()}


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
