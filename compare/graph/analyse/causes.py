"""What in the program a buffer comes from: one rule for every view."""

from __future__ import annotations

from dataclasses import dataclass

from ..model import FusionGraph
from ..operations import MOVEMENT, token


@dataclass(frozen=True)
class Cause:
    """The operation whose result the buffer is, by its place; of a kernel that writes several buffers, where nothing
    says which operation wrote which, that of all its operations.

    line: "file:line", "" where it is not known, or one of several. stages: that operation's, or then the kernel's.
    """

    line: str = ""
    stages: tuple[str, ...] = ()


def cause(graph: FusionGraph, buffer: str) -> Cause:
    """Of the kernel that writes the buffer last, the last operation that computes something; one that only moves data
    where there is no other. Both empty for an input, and where the kernel's operations have no place."""
    writers = graph.producers.get(buffer, ())
    if graph.kernels is None or not writers:
        return Cause()
    kernel = graph.kernels[writers[-1]]
    if len({access.buffer for access in kernel.outputs or ()}) > 1:
        return Cause(kernel.lines[0] if len(kernel.lines) == 1 else "", kernel.stages)
    placed = [op for op in kernel.source_ops if op.stage or op.line]
    computing = [op for op in placed if token(op.op) not in MOVEMENT]
    op = next(reversed(computing or placed), None)
    return Cause() if op is None else Cause(op.line, (op.stage,) if op.stage else ())


def cause_text(graph: FusionGraph, buffer: str) -> str:
    """The operation's line, else the stages that wrote the buffer: "by norm, act"; "" where neither is known."""
    found = cause(graph, buffer)
    return found.line or (f"by {', '.join(found.stages)}" if found.stages else "")
