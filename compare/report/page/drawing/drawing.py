"""The fusion graphs of one case side by side: what `static/drawing.js` draws.

Stages are bands, implementations are columns, and a kernel is a box over the bands whose operations it holds. Here is
decided which boxes there are, where they overlap and which are folded; how high a band is, the browser decides.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ....base.text import printable
from ....base.usage import UsageError
from ....graph import formats
from ....graph.analyse.align import Alignment, align
from ....graph.analyse.totals import declared_bytes, tally
from ....graph.buffer_edges import buffer_edges
from ....graph.model import PHASES, FusionGraph
from ....plan import paired_rounds
from ....sources.graph_sources import GraphSource
from ..content.reading import BASELINES, MAIN
from .bands import Band, computed, grouped
from .bands import of_graphs as bands_of
from .boxes import buffers, bytes_of, costs, operations
from .folding import folds, little
from .tracks import pieces

AT_FIRST = 5  # columns: what a screen is wide
MOST_KERNELS = 2000  # of a column: a second of a browser's time
MOST_WORDS = 400  # characters of a compiler's reason


def of_case(found: Sequence[GraphSource]) -> dict[str, Any] | None:
    """The drawing's data, None where no graph has a kernel or an operation.

    found: the records of one case that have a graph, in the order of the columns. A graph that cannot be read costs its
    own column: `unread` says why.
    """
    read: list[tuple[GraphSource, FusionGraph]] = []
    unread: list[dict[str, str]] = []
    for each in found:
        try:
            graph = each.graph()
        except UsageError as problem:
            unread.append({"name": _implementation(each), "why": printable(str(problem))})
            continue
        if len(graph.kernels or ()) > MOST_KERNELS:
            why = f"{len(graph.kernels or ()):,} kernels are too many for a picture; `xlafuse inspect` lists them"
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
        "bands": [{"label": formats.name(band.label, 60), "part": band.phase} for band in bands],
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
    """Where boxes are, by column and kernel ([lane, first group, last group]), and which of them are folded; groups: of
    bands, which are drawn as one. Kernels of little cost are in the group of most of their stages alone then."""
    group = {band: number for number, bands in enumerate(groups) for band in bands}
    columns = []
    for graph, own in zip(graphs, held, strict=True):
        within = {index: [group[band] for band in bands] for index, bands in own.items()}
        if len(groups) < len(group):
            brief = {index: within[index] for index in little(graph) if within[index]}
            within |= {index: [max(found, key=found.count)] for index, found in brief.items()}
        placed = pieces({index: sorted(set(found)) for index, found in within.items()})
        columns.append({
            "pieces": [[[piece.lane, piece.first, piece.last] for piece in boxes] for boxes in placed.values()],
            "folds": folds(graph, placed),
        })
    return {"groups": groups, "columns": columns}


def ordered(found: Iterable[GraphSource]) -> list[GraphSource]:
    """The order of the columns: `MAIN`, then the others fastest first, then baselines."""
    return sorted(found, key=_rank)


def _rank(found: GraphSource) -> tuple[bool, int, float]:
    name = _implementation(found)
    time = paired_rounds.call_us(found.record) if found.record else None
    return name in BASELINES, MAIN.index(name) if name in MAIN else len(MAIN), time or float("inf")


def _shown(found: Sequence[GraphSource]) -> list[int]:
    """Which columns are drawn at first: who is compared, and the fastest of the others while there is room. Baselines
    only where there is nothing else."""
    order = sorted(range(len(found)), key=lambda i: _rank(found[i]))
    compared = [i for i in order if _implementation(found[i]) not in BASELINES]
    return sorted((compared or order)[:AT_FIRST])


def _implementation(found: GraphSource) -> str:
    return printable(found.record.implementation if found.record else found.name, 80)


def _held(
    column: int, graph: FusionGraph, alignment: Alignment, bands: Sequence[Band]
) -> dict[int, list[int]]:
    """By launch index the bands that a kernel computes something of; none where its part names no stage at all: such
    kernels are a column of boxes beside the bands, in the order of launch."""
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
    column: int, found: GraphSource, graph: FusionGraph, alignment: Alignment, bands: Sequence[Band],
    held: Mapping[int, list[int]], longest: float,
) -> dict[str, Any]:
    kernels = graph.kernels or ()
    order = {buffer.name: i for i, buffer in enumerate(graph.buffers)}
    moved = tally(map(declared_bytes, kernels)).exact
    time = tally(kernel.device_time_us for kernel in kernels).exact
    boxes = [
        {
            **costs(graph, kernel, found, moved, time, order),
            "bar": round(kernel.device_time_us / longest, 3) if kernel.device_time_us and longest else 0,
            "ops": operations(kernel, held[index], bands),
            "in": bytes_of(graph, kernel.inputs, ("input", "constant")),
            "out": bytes_of(graph, kernel.outputs, ("output",)),
        }
        for index, kernel in enumerate(kernels)
    ]
    drawn, reasons = _edges(graph, order)
    return {
        "name": _implementation(found),
        "title": _title(found, graph, moved),
        "kernels": boxes,
        "buffers": buffers(graph),
        "edges": drawn,
        "reasons": reasons,
        "cells": [_words(column, band, graph, alignment) for band in bands],
        "note": _note(graph),
    }


def _title(found: GraphSource, graph: FusionGraph, moved: float | None) -> str:
    time = None if found.record is None else paired_rounds.call_us(found.record)
    words = [formats.count(len(graph.kernels), "kernel") if graph.kernels is not None else "kernels not known"]
    words += [] if time is None else [formats.microseconds(time)]
    return " · ".join([*words, *([] if moved is None else [formats.size(moved)])])


def _note(graph: FusionGraph) -> str:
    if graph.kernels is not None:
        return ""
    return f"operations, kernels not known: {formats.words(formats.operation(op) for op in graph.operations)}"[:4000]


def _edges(graph: FusionGraph, order: Mapping[str, int]) -> tuple[list[dict[str, Any]], list[str]]:
    """What one kernel writes and another reads, from who wrote it last to each reader, largest first; and the reasons
    why they are not one kernel, which edges name by their place."""
    kernels, why = graph.kernels or (), _why_not(graph)
    reasons: dict[str, int] = {}
    drawn: list[dict[str, Any]] = []
    for buffer in graph.buffers:
        for edge in buffer_edges(graph, buffer):
            if edge.writer is not None and edge.reader is not None:
                said = why.get((kernels[edge.writer].name, kernels[edge.reader].name), [])
                drawn.append({
                    "from": edge.writer, "to": edge.reader, "buffer": order[buffer.name],
                    "why": [reasons.setdefault(words, len(reasons)) for words in said],
                })
    drawn.sort(key=lambda edge: -graph.buffers[edge["buffer"]].bytes)
    return drawn, list(reasons)


def _why_not(graph: FusionGraph) -> Mapping[tuple[str, str], list[str]]:
    said: dict[tuple[str, str], dict[str, None]] = {}
    for reason in graph.reasons:
        words = f"{reason.code}: {printable(reason.text, MOST_WORDS)} ({printable(reason.origin, 60)})"
        said.setdefault((reason.producer, reason.consumer), {})[words] = None
    return {pair: list(words)[:3] for pair, words in said.items()}


def _words(column: int, band: Band, graph: FusionGraph, alignment: Alignment) -> str:
    """Which kernels hold the stage, and what became of it against the first column that does
    (compare.graph.analyse.align)."""
    if band.row is None:
        loose = alignment.unattributed[column]
        return _numbers(i for i in loose if (graph.kernels or ())[i].phase == band.phase)
    cell = alignment.rows[band.row].cells[column]
    if cell.kernels is None:
        return "its kernels are not known"
    relations = ", ".join(word for word in cell.relations if word != "same region")
    return ": ".join(filter(None, (_numbers(cell.kernels), relations)))


def _numbers(kernels: Iterable[int]) -> str:
    listed = ", ".join(str(index + 1) for index in kernels)
    return f"in {listed}" if listed else ""
