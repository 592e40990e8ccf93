"""The fusion graphs of one case side by side: what `static/drawing.js` draws.

Stages are bands, implementations are columns, and a kernel is a box over the bands whose operations it holds. Here is
decided which boxes there are, where they overlap and which are folded; how high a band is, the browser decides.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from compare.graph import formats
from compare.graph.align import Alignment, align, part_of
from compare.graph.model import Access, FusionGraph, Kernel, Part
from compare.graph.operations import MOVEMENT, token
from compare.graph.roofline import place
from compare.graph.totals import bytes_moved, known_bytes, tally
from compare.html.folding import folds
from compare.html.lanes import pieces
from compare.opening import Found
from compare.report import printable, verdicts
from compare.selection import UsageError

PARTS: tuple[Part, ...] = ("forward", "backward")
UNNAMED = "no stage named"
MAIN = ("xla", "inductor", "triton", "cuda")
AT_FIRST = 5  # columns: what a screen is wide
MOST_WORDS = 400  # characters of a compiler's reason
MOST_ACCESSES = 12  # buffers listed of a kernel


@dataclass(frozen=True)
class _Band:
    """A stage of one part; of `row` None, what names no stage there."""

    part: Part
    label: str
    row: int | None


def of_case(found: Sequence[Found]) -> dict[str, Any] | None:
    """The drawing's data, None where no graph has a kernel or an operation.

    found: the records of one case that have a graph, in the order of the columns. A graph that cannot be read costs its
    own column: `unread` says why.
    """
    read: list[tuple[Found, FusionGraph]] = []
    unread: list[dict[str, str]] = []
    for each in found:
        try:
            read.append((each, each.graph()))
        except UsageError as problem:
            unread.append({"name": _implementation(each), "why": printable(str(problem))})
    graphs = [graph for _, graph in read]
    if not any(graph.kernels or graph.operations for graph in graphs):
        return {"unread": unread, "bands": [], "columns": [], "shown": []} if unread else None
    alignment = align(graphs)
    bands = _bands(graphs, alignment)
    longest = max((k.device_time_us or 0 for graph in graphs for k in graph.kernels or ()), default=0)
    columns = [_column(i, each, graph, alignment, bands, longest) for i, (each, graph) in enumerate(read)]
    return {
        "bands": [{"label": formats.name(band.label, 60), "part": band.part} for band in bands],
        "inferred": any(row.inferred for row in alignment.rows),
        "columns": columns,
        "shown": _shown([each for each, _ in read]),
        "unread": unread,
    }


def _shown(found: Sequence[Found]) -> list[int]:
    """Which columns are drawn at first: who is compared, and the fastest of the others while there is room."""
    times = [verdicts.call_us(each.record) if each.record else None for each in found]
    order = sorted(range(len(found)), key=lambda i: (_implementation(found[i]) not in MAIN, times[i] or float("inf")))
    return sorted(order[:AT_FIRST])


def _implementation(found: Found) -> str:
    return printable(found.record.implementation if found.record else found.name, 80)


def _bands(graphs: Sequence[FusionGraph], alignment: Alignment) -> list[_Band]:
    """Forward's, then backward's; each part ends with what names no stage, where anything does not."""
    bands = []
    for part in PARTS:
        rows = [_Band(part, row.stage, i) for i, row in enumerate(alignment.rows) if row.part == part]
        rows.sort(key=lambda band: _when(graphs, alignment, band.row or 0))
        loose = any(
            (graph.kernels or ())[k].part == part
            for graph, kernels in zip(graphs, alignment.unattributed, strict=True) for k in kernels
        )  # fmt: skip
        bands += [*rows, *([_Band(part, UNNAMED, None)] if loose else [])]
    return bands


def _when(graphs: Sequence[FusionGraph], alignment: Alignment, row: int) -> float:
    """When a stage is computed: where its kernels stand among their graph's, costly ones first of all, on average.

    Where a stage first appears tells little: compilers launch a mask or an index long before what uses it.
    """
    times = []
    for graph, cell in zip(graphs, alignment.rows[row].cells, strict=True):
        kernels = graph.kernels or ()
        found = []
        for index in cell.kernels or ():
            ops = kernels[index].source_ops
            own = [i for i, op in enumerate(ops) if _belongs(op.stage, alignment.rows[row].stage)]
            within = sum(own) / len(own) / len(ops) if own else 0
            cost = kernels[index].device_time_us or known_bytes(kernels[index]) / 1e6
            found.append((index + within, cost + 1e-9))
        if found:
            times.append(sum(at * cost for at, cost in found) / sum(cost for _, cost in found) / len(kernels))
    return sum(times) / len(times) if times else 0.0


def _column(
    column: int, found: Found, graph: FusionGraph, alignment: Alignment, bands: Sequence[_Band], longest: float
) -> dict[str, Any]:
    kernels = graph.kernels or ()
    held: dict[int, list[int]] = {index: [] for index in range(len(kernels))}
    for number, band in enumerate(bands):
        if band.row is not None:
            for index in alignment.rows[band.row].cells[column].kernels or ():
                held[index].append(number)
    held = {index: _computed(kernels[index], numbers, bands) for index, numbers in held.items()}
    # A part whose kernels name no stage at all is a column of boxes beside the bands, in the order of launch.
    free = [part for part in PARTS if not any(held[i] for i, kernel in enumerate(kernels) if kernel.part == part)]
    for index, kernel in enumerate(kernels):
        if not held[index] and kernel.part not in free:
            held[index] = [i for i, band in enumerate(bands) if band.row is None and band.part == kernel.part]
    placed = pieces(held)
    moved = tally(map(bytes_moved, kernels)).exact
    time = tally(kernel.device_time_us for kernel in kernels).exact
    boxes = [
        {
            **_costs(graph, kernel, found, moved, time),
            "bar": round(kernel.device_time_us / longest, 4) if kernel.device_time_us and longest else 0,
            "pieces": [[piece.lane, piece.first, piece.last] for piece in placed[index]],
            "ops": _operations(kernel, held[index], bands),
            "in": _stub(graph, kernel.inputs, ("input", "constant")),
            "out": _stub(graph, kernel.outputs, ("output",)),
        }
        for index, kernel in enumerate(kernels)
    ]
    return {
        "name": _implementation(found),
        "title": _title(found, graph, moved),
        "kernels": boxes,
        "folds": folds(kernels, placed),
        "edges": _edges(graph),
        "cells": [_words(column, band, graph, alignment) for band in bands],
        "note": _note(graph),
    }


def _title(found: Found, graph: FusionGraph, moved: float | None) -> str:
    time = None if found.record is None else verdicts.call_us(found.record)
    words = [formats.count(len(graph.kernels), "kernel") if graph.kernels is not None else "kernels not known"]
    words += [] if time is None else [formats.microseconds(time)]
    return " · ".join([*words, *([] if moved is None else [formats.size(moved)])])


def _note(graph: FusionGraph) -> str:
    if graph.kernels is not None:
        return ""
    return f"operations, kernels not known: {formats.words(formats.operation(op) for op in graph.operations)}"[:4000]


def _costs(
    graph: FusionGraph, kernel: Kernel, found: Found, moved: float | None, time: float | None
) -> dict[str, Any]:
    facts = kernel.facts
    limits = found.ceilings
    precision = found.record.case.precision if found.record else None
    floor = None if limits is None or not limits.streams else place(graph, kernel, limits, precision)
    known = {
        "registers": facts.get("registers"), "shared memory": _size(facts.get("shared_bytes")),
        "spilled": _size(facts.get("spills_bytes")), "grid": facts.get("grid"), "configuration": facts.get("config"),
    }
    return {
        "name": formats.name(kernel.name, 200), "kind": kernel.kind, "part": kernel.part,
        "time": "" if kernel.device_time_us is None else formats.microseconds(kernel.device_time_us),
        "time_share": formats.share(kernel.device_time_us, time),
        "bytes": formats.size(bytes_moved(kernel)), "bytes_share": formats.share(bytes_moved(kernel), moved),
        "read": formats.size(kernel.bytes_read), "written": formats.size(kernel.bytes_written),
        "flops": "?" if kernel.flops is None else formats.flops(kernel.flops),
        "launches": "?" if kernel.launches is None else str(kernel.launches),
        "floor": "" if floor is None else f"{formats.microseconds(floor.floor_us)}, {floor.bound}",
        "lines": [printable(line, 200) for line in kernel.lines],
        "reads": _accesses(graph, kernel.inputs), "writes": _accesses(graph, kernel.outputs),
        "facts": {name: printable(str(value), 200) for name, value in known.items() if value},
    }  # fmt: skip


def _size(count: Any) -> str | None:
    return formats.size(count) if isinstance(count, int) and count else None


def _operations(
    kernel: Kernel, held: Iterable[int], bands: Sequence[_Band]
) -> dict[str, str]:
    """By band, the operations there in words; under "" those of a kernel that is in none."""
    found: dict[int, list[str]] = {number: [] for number in held}
    rest = []
    for op in kernel.source_ops:
        part = part_of(kernel, op)
        own = [i for i in found if bands[i].part == part and _belongs(op.stage, bands[i].label)]
        if own:
            found[max(own, key=lambda i: len(bands[i].label))].append(formats.operation(op))
        else:
            rest.append(formats.operation(op))
    for number in found:
        if bands[number].row is None:
            found[number] += rest
            rest = []
    words = {str(number): formats.words(ops) for number, ops in found.items()}
    return words | ({"": formats.words(rest)} if rest else {})


def _computed(kernel: Kernel, held: list[int], bands: Sequence[_Band]) -> list[int]:
    """Without bands of which the kernel only views, moves or converts something, if it computes something in others."""
    telling = [
        i for i in held
        if any(
            token(op.op) not in MOVEMENT and part_of(kernel, op) == bands[i].part and _belongs(op.stage, bands[i].label)
            for op in kernel.source_ops
        )
    ]  # fmt: skip
    return telling or held


def _belongs(stage: str, label: str) -> bool:
    """Bands have stages cut to a common depth."""
    return stage == label or stage.startswith(f"{label}/")


def _accesses(graph: FusionGraph, accesses: Sequence[Access] | None) -> list[str]:
    if accesses is None:
        return ["not known"]
    ordered = sorted(accesses, key=lambda access: -(access.bytes or 0))
    shown = [_access(graph, access) for access in ordered[:MOST_ACCESSES]]
    return shown + ([f"and {len(ordered) - MOST_ACCESSES} smaller ones"] if len(ordered) > MOST_ACCESSES else [])


def _access(graph: FusionGraph, access: Access) -> str:
    buffer = graph.buffer[access.buffer]
    part = "" if access.bytes in (None, buffer.bytes) else f" of {formats.size(buffer.bytes)}"
    role = "" if buffer.role == "intermediate" else f", {buffer.role}"
    return f"{formats.name(buffer.name, 40)} {formats.shape(buffer)} {formats.size(access.bytes)}{part}{role}"


def _stub(graph: FusionGraph, accesses: Sequence[Access] | None, roles: tuple[str, ...]) -> int:
    """Bytes that one launch has of the program's own inputs or outputs, as far as is known."""
    return sum(access.bytes or 0 for access in accesses or () if graph.buffer[access.buffer].role in roles)


def _edges(graph: FusionGraph) -> list[dict[str, Any]]:
    """What one kernel writes and another reads, from who wrote it last to each reader, largest first."""
    kernels, why = graph.kernels or (), _why_not(graph)
    edges = []
    for buffer in graph.buffers:
        writers = graph.producers.get(buffer.name, ())
        for reader in graph.consumers.get(buffer.name, ()):
            writer = max((index for index in writers if index < reader), default=None)
            if writer is not None:
                pair = kernels[writer].name, kernels[reader].name
                edges.append({
                    "from": writer, "to": reader, "bytes": buffer.bytes, "role": buffer.role,
                    "text": f"{formats.name(buffer.name, 60)} {formats.shape(buffer)} {formats.size(buffer.bytes)}",
                    "why": why.get(pair, []),
                })  # fmt: skip
    return sorted(edges, key=lambda edge: -edge["bytes"])


def _why_not(graph: FusionGraph) -> Mapping[tuple[str, str], list[str]]:
    said: dict[tuple[str, str], dict[str, None]] = {}
    for reason in graph.reasons:
        words = f"{reason.code}: {printable(reason.text, MOST_WORDS)} ({printable(reason.origin, 60)})"
        said.setdefault((reason.producer, reason.consumer), {})[words] = None
    return {pair: list(words)[:3] for pair, words in said.items()}


def _words(column: int, band: _Band, graph: FusionGraph, alignment: Alignment) -> str:
    """Which kernels hold the stage, and what became of it against the first column that does (compare.graph.align)."""
    if band.row is None:
        loose = alignment.unattributed[column]
        return _numbers(i for i in loose if (graph.kernels or ())[i].part == band.part)
    cell = alignment.rows[band.row].cells[column]
    if cell.kernels is None:
        return "its kernels are not known"
    relations = ", ".join(word for word in cell.relations if word != "same region")
    return ": ".join(filter(None, (_numbers(cell.kernels), relations)))


def _numbers(kernels: Iterable[int]) -> str:
    listed = ", ".join(str(index + 1) for index in kernels)
    return f"in {listed}" if listed else ""
