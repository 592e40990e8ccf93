"""Small fusion graphs, written as one line for each kernel."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from xlafuse.compare.graph.model import Access, Buffer, FusionGraph, Kernel, Kind, Role, SourceOp


def op(text: str) -> SourceOp:
    """ "stage:name", "stage:name@line", "stage:name@line!" of a gradient; the site is the text without "!"."""
    stage, _, rest = text.removesuffix("!").rpartition(":")
    name, _, line = rest.partition("@")
    return SourceOp(name, stage, f"model.py:{line}" if line else "", text.removesuffix("!"), text.endswith("!"))


def kernel(name: str, kind: Kind, ops: str, inputs: str, outputs: str, **more: Any) -> Kernel:
    """Names of ops and buffers are separated by spaces; a buffer's access is all of it (see `graph`)."""
    reads, writes = (tuple(Access(buffer, -1) for buffer in names.split()) for names in (inputs, outputs))
    return Kernel(name, kind, source_ops=tuple(map(op, ops.split())), inputs=reads, outputs=writes, **more)


def graph(*kernels: Kernel, sizes: str = "", compiler: str = "xla", **roles: str) -> FusionGraph:
    """Return a graph of these kernels.

    sizes: "name=elements" of one-dimensional float32 buffers; 1000 by default. Roles are given as `saved="h u"`. By
    default a buffer without a writer is an input, one without a reader an output, and the others are intermediates.
    """
    elements = {name: int(count) for name, _, count in (item.partition("=") for item in sizes.split())}
    told: dict[str, Role] = {name: role for role, names in roles.items() for name in names.split()}  # type: ignore
    names = dict.fromkeys(a.buffer for k in kernels for a in (*(k.inputs or ()), *(k.outputs or ())))
    written = {a.buffer for k in kernels for a in k.outputs or ()}
    read = {a.buffer for k in kernels for a in k.inputs or ()}

    def buffer(name: str) -> Buffer:
        count = elements.get(name, 1000)
        role: Role = "input" if name not in written else "intermediate" if name in read else "output"
        return Buffer(name, (count,), "f32", 4 * count, told.get(name, role))

    def whole(accesses: tuple[Access, ...] | None) -> tuple[Access, ...] | None:
        if accesses is None:
            return None
        return tuple(Access(a.buffer, 4 * elements.get(a.buffer, 1000) if a.bytes == -1 else a.bytes) for a in accesses)

    placed = tuple(replace(k, inputs=whole(k.inputs), outputs=whole(k.outputs)) for k in kernels)
    return FusionGraph("step", compiler, placed, tuple(map(buffer, names)))
