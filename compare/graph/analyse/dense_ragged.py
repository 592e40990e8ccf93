"""Ragged products that a compiler computes densely: each row with every group's weight, all but its own masked."""

from __future__ import annotations

import math

from ..model import FusionGraph, Kernel
from ..operations import is_product

_OPS = ("ragged_dot", "ragged_dot_general")
_WEIGHTS = 3  # dimensions of the groups' weights, one for the group


def dense_ragged_products(graph: FusionGraph) -> dict[int, int | None]:
    """Return, by launch index, the number of groups; None if unknown. It is also the factor of superfluous FLOPs.

    XLA's own operation `ragged-dot` and grouped library calls skip the rows of other groups.
    """
    return {
        index: _groups(graph, kernel) for index, kernel in enumerate(graph.kernels or ())
        if _is_dense(kernel) and any(op.op in _OPS for op in kernel.source_ops)
    }


def described(graph: FusionGraph) -> dict[int, str]:
    """Return, by launch index, what a kernel does for a ragged product."""
    return {
        index: "a ragged product computed densely" + (f", {groups:,} times its FLOPs" if groups else "")
        for index, groups in dense_ragged_products(graph).items()
    }


def _is_dense(kernel: Kernel) -> bool:
    opcodes = (kernel.facts.get("opcode"), *kernel.facts.get("opcodes", ()))
    library = str(kernel.facts.get("custom_call_target", ""))
    plain = library.startswith("__cublas$") and "group" not in library.lower()
    return is_product(kernel) and ("dot" in opcodes or plain)


def _groups(graph: FusionGraph, kernel: Kernel) -> int | None:
    """Return the length of the integer vector (the groups' sizes) that is also a dimension of rows and weights."""
    lengths = {
        math.prod(buffer.shape) for buffer in graph.buffers
        if buffer.dtype in ("s32", "s64", "u32", "u64") and math.prod(buffer.shape) in buffer.shape
    }
    shapes = [graph.buffer[access.buffer].shape for access in kernel.inputs or ()]
    operands = [shape for shape in shapes if len(shape) >= _WEIGHTS]
    found = lengths.intersection(*operands) if operands else set()
    return found.pop() if len(found) == 1 else None
