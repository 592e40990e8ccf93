"""A fusion graph as Graphviz text: kernels are boxes, and buffers between them are edges."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from ...base.text import printable
from .. import formats
from ..analyse.missed_fusions import missed
from ..analyse.totals import declared_bytes
from ..buffer_edges import buffer_edges
from ..model import PHASES, Buffer, FusionGraph, Kernel

WIDEST = 8.0  # points, for the largest buffer


def dot(graph: FusionGraph) -> str:
    """Return text for `dot -Tsvg`. An edge's width shows its share of the largest buffer; residuals are dashed."""
    lines = ["digraph xlafuse {", f"  label={_quoted(graph.name, formats.origin(graph))};", *_STYLE]
    kernels = graph.kernels or ()
    for phase in PHASES:
        members = [index for index, kernel in enumerate(kernels) if kernel.phase == phase]
        if members:
            lines.append(f"  subgraph cluster_{phase} {{ label={phase};")
            lines += [f"    k{index} [label={_kernel(index, kernels[index])}];" for index in members]
            lines.append("  }")
    if graph.kernels is None:
        lines += [f"  o{i} [label={_quoted(op.op, op.stage, op.line)}];" for i, op in enumerate(graph.operations)]
    largest = max((buffer.bytes for buffer in graph.buffers), default=0)
    why_not = _why_not(graph)
    for number, buffer in enumerate(graph.buffers):
        lines += _edges(number, buffer, graph, largest, why_not)
    return "\n".join([*lines, "}"]) + "\n"


_STYLE = (
    "  labelloc=t; fontname=Helvetica;",
    "  node [shape=box, fontname=Helvetica, fontsize=10];",
    "  edge [fontname=Helvetica, fontsize=9, arrowsize=0.6];",
)


def _kernel(index: int, kernel: Kernel) -> str:
    cost = f"{kernel.kind}, {formats.size(declared_bytes(kernel))}"
    if kernel.device_time_us is not None:
        cost += f", {formats.microseconds(kernel.device_time_us)}"
    stages: dict[str, list[str]] = {}
    for op in kernel.source_ops:
        stages.setdefault(op.stage, []).append(formats.operation(op))
    held = [f"{stage}: {formats.words(ops)}" if stage else formats.words(ops) for stage, ops in stages.items()]
    return _quoted(f"{index + 1}. {formats.name(kernel.name)}", cost, *held)


def _edges(
    number: int, buffer: Buffer, graph: FusionGraph, largest: int, why_not: Mapping[tuple[str, str], str]
) -> Iterator[str]:
    """Yield edges from the writers of the contents to each reader. An input or output gets a node of its own."""
    kernels = graph.kernels or ()
    style = f"penwidth={max(0.5, WIDEST * math.sqrt(buffer.bytes / largest)) if largest else 0.5:.2f}"
    if buffer.role == "saved":
        style += ", style=dashed"
    outside = f"b{number}"
    found = list(buffer_edges(graph, buffer))
    if not found or any(None in (edge.writer, edge.reader) for edge in found):
        shape = "shape=ellipse" if buffer.role != "constant" else "shape=ellipse, style=dotted"
        yield f"  {outside} [{shape}, label={_quoted(buffer.name, _size(buffer))}];"
    for edge in found:
        if edge.writer is None:
            yield f"  {outside} -> k{edge.reader} [{style}];"
        elif edge.reader is None:
            yield f"  k{edge.writer} -> {outside} [{style}];"
        else:
            pair = kernels[edge.writer].name, kernels[edge.reader].name
            label = _quoted(buffer.name, _size(buffer), why_not.get(pair, ""))
            yield f"  k{edge.writer} -> k{edge.reader} [{style}, label={label}];"


def _why_not(graph: FusionGraph) -> dict[tuple[str, str], str]:
    """Return the reason codes by names of producer and consumer."""
    codes: dict[tuple[str, str], dict[str, None]] = {}
    for reason in missed(graph):
        codes.setdefault((reason.producer, reason.consumer), {})[reason.code] = None
    return {pair: f"not fused: {', '.join(found)}" for pair, found in codes.items()}


def _size(buffer: Buffer) -> str:
    return f"{formats.shape(buffer)} {formats.size(buffer.bytes)}"


def _quoted(*lines: str) -> str:
    """Return a label of several lines, with the characters escaped that Graphviz interprets."""
    shown = (printable(line) for line in lines if line)
    escaped = (line.replace("\\", "\\\\").replace('"', '\\"').replace("&", "&amp;") for line in shown)
    return '"' + "\\n".join(escaped) + '"'
