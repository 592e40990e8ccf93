"""Fusion graphs as JSON for Google's Model Explorer (pip install ai-edge-model-explorer; see its graph_builder.py).

Each kernel is a node, in the layer of its phase and of the stages that all its operations share. Inputs and outputs
are nodes, too. An edge is a buffer, with its shape and bytes. An overlay for each reason code connects the kernels that
were not fused for it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from ...base.text import printable
from .. import formats
from ..analyse.missed_fusions import missed
from ..analyse.totals import declared_bytes
from ..buffer_edges import buffer_edges
from ..model import Buffer, FusionGraph, Kernel
from .text_view import totals_lines

Json = dict[str, Any]

_LONGEST = 200  # characters of a value
_WHY = "#d67195"


def collection(label: str, graphs: Iterable[tuple[str, FusionGraph]]) -> Json:
    """Return a GraphCollection. graphs: each with a unique name."""
    return {"label": _text(label), "graphs": [_graph(name, graph) for name, graph in graphs]}


def _graph(name: str, graph: FusionGraph) -> Json:
    nodes = [_kernel(index, kernel, graph) for index, kernel in enumerate(graph.kernels or ())]
    for number, buffer in enumerate(graph.buffers):
        _add_edges(nodes, number, buffer, graph)
    nodes += [_operation(number, graph) for number in range(len(graph.operations)) if graph.kernels is None]
    notes = {"compiled": formats.origin(graph), **{f"note {i}": line for i, line in enumerate(totals_lines(graph), 1)}}
    found: Json = {
        "id": _text(name), "nodes": nodes, "groupNodeAttributes": {"": {key: _text(v) for key, v in notes.items()}}
    }
    if reasons := list(_reasons(graph)):
        overlays = {"name": "why not fused", "type": "edge_overlays", "overlays": reasons}
        found["tasksData"] = {"edgeOverlaysDataListLeftPane": [overlays], "edgeOverlaysDataListRightPane": []}
    return found


def _kernel(index: int, kernel: Kernel, graph: FusionGraph) -> Json:
    operations = formats.words(formats.operation(op) for op in kernel.source_ops)
    details = {
        "kind": kernel.kind, "launch": str(index + 1),
        "launches": formats.UNKNOWN if kernel.launches is None else str(kernel.launches),
        "bytes declared": formats.size(declared_bytes(kernel)), "bytes read": formats.size(kernel.bytes_read),
        "bytes written": formats.size(kernel.bytes_written),
        "FLOP": formats.UNKNOWN if kernel.flops is None else formats.flops(kernel.flops),
        "device time": "" if kernel.device_time_us is None else formats.microseconds(kernel.device_time_us),
        "operations": operations, "stages": ", ".join(kernel.stages), "lines": ", ".join(kernel.lines),
        "name at run time": kernel.runtime_name or "", "configuration": kernel.provenance,
    }
    outputs = [
        {"id": str(place), "attrs": _attributes(_of_buffer(graph.buffer[access.buffer], access.bytes))}
        for place, access in enumerate(kernel.outputs or ())
    ]
    return _node(f"k{index}", formats.name(kernel.name, 80), _layer(kernel), _attributes(details), outputs)


def _node(id: str, label: str, layer: str, attributes: list[Json], outputs: Sequence[Json] = ()) -> Json:
    return {
        "id": id, "label": label, "namespace": layer, "attrs": attributes, "incomingEdges": [],
        "outputsMetadata": list(outputs),
    }


def _layer(kernel: Kernel) -> str:
    """Return the kernel's layer: its phase, and below it the scopes that all its stages share."""
    shared = os.path.commonprefix([stage.split("/") for stage in kernel.stages])
    return "/".join([kernel.phase, *(scope for scope in map(_text, shared) if scope)])


def _add_edges(nodes: list[Json], number: int, buffer: Buffer, graph: FusionGraph) -> None:
    """Add a buffer's edges to its readers, and nodes for an input and an output.

    An argument that is updated in place has two nodes.
    """
    found = list(buffer_edges(graph, buffer))
    if not found or any(edge.writer is None for edge in found):
        nodes.append(_outside(f"b{number}", "inputs", buffer))
    if any(edge.reader is None for edge in found):
        nodes.append(_outside(f"b{number}-out", "outputs", buffer))
    for edge in found:
        source, place = f"b{number}", "0"
        if edge.writer is not None:
            written = (graph.kernels or ())[edge.writer].outputs or ()
            place = str(next(i for i, access in enumerate(written) if access.buffer == buffer.name))
            source = f"k{edge.writer}"
        into = nodes[-1 if edge.reader is None else edge.reader]["incomingEdges"]  # kernels come first
        into.append({"sourceNodeId": source, "sourceNodeOutputId": place, "targetNodeInputId": str(len(into))})


def _outside(id: str, layer: str, buffer: Buffer) -> Json:
    about = _attributes(_of_buffer(buffer, buffer.bytes))
    return _node(id, formats.name(buffer.name, 80), layer, about, [{"id": "0", "attrs": about}])


def _operation(number: int, graph: FusionGraph) -> Json:
    op = graph.operations[number]
    layer = "/".join(filter(None, ["backward" if op.backward else "forward", *map(_text, op.stage.split("/"))]))
    return _node(f"o{number}", formats.operation(op), layer, _attributes({"line": op.line, "stage": op.stage}))


def _reasons(graph: FusionGraph) -> Iterator[Json]:
    """Yield an overlay for each code; a reason whose names match no kernel, or several, is left out."""
    by_code: dict[str, list[Json]] = {}
    for reason in missed(graph):
        ends = [graph.named.get(name, ()) for name in (reason.producer, reason.consumer)]
        if all(len(end) == 1 for end in ends):
            saved = "" if reason.bytes_saved is None else f": {formats.size(reason.bytes_saved)}"
            pair = {"sourceNodeId": f"k{ends[0][0]}", "targetNodeId": f"k{ends[1][0]}"}
            by_code.setdefault(reason.code, []).append({**pair, "label": f"{reason.code}{saved}"})
    for code, found in by_code.items():
        yield {"name": code, "edgeColor": _WHY, "edges": found}


def _of_buffer(buffer: Buffer, size: int | None) -> dict[str, str]:
    """Return a buffer's attributes. Model Explorer writes "shape" on the edge."""
    return {
        "shape": f"{formats.shape(buffer)} {formats.size(size)}", "buffer": buffer.name, "role": buffer.role,
        "bytes": formats.UNKNOWN if size is None else str(size),
    }


def _attributes(values: dict[str, str]) -> list[Json]:
    return [{"key": key, "value": _text(value)} for key, value in values.items() if value]


def _text(text: str) -> str:
    return printable(text, _LONGEST)
