"""The operation of the program that a buffer comes from."""

from __future__ import annotations

from dataclasses import dataclass

from ..model import FusionGraph
from ..operations import MOVEMENT, token


@dataclass(frozen=True)
class Cause:
    """The place of the operation whose result the buffer is.

    line: "file:line"; "" where it is unknown or ambiguous.
    stages: the operation's stage. A kernel that writes several buffers does not say which operation wrote which; then
        these are all stages of the kernel.
    """

    line: str = ""
    stages: tuple[str, ...] = ()


def cause(graph: FusionGraph, buffer: str) -> Cause:
    """Return the place of the last computing operation in the kernel that writes the buffer last.

    A kernel without a computing operation gives its last data movement. Both fields are empty for an input, and where
    the kernel's operations have no place.
    """
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
    """Return the operation's line, else its stages ("by norm, act"); "" where neither is known."""
    found = cause(graph, buffer)
    return found.line or (f"by {', '.join(found.stages)}" if found.stages else "")
