"""Products that a compiler does not compute in the plain way: split-K, and ragged products computed densely.

Split-K: several blocks share the sums of one result, and another kernel adds their partial sums up.
A ragged product computed densely: each row with every group's weight, all but its own masked.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..model import Buffer, FusionGraph, Kernel
from ..operations import PRODUCTS, is_product, may_multiply, token

_RAGGED = ("ragged_dot", "ragged_dot_general")
_DIMENSIONS = 3  # of the groups' weights, one for the group


@dataclass(frozen=True)
class SplitK:
    """A product split along the summed dimension, and a kernel that adds partial sums up; a product may have several.

    product, sums: launch indices. buffer: of the partial sums. parts: of each element of the result.
    """

    product: int
    sums: int
    buffer: str
    parts: int


def split_products(graph: FusionGraph) -> list[SplitK]:
    """Return the products whose partial sums other kernels add up, in the order of the buffers.

    A graph of XLA says it ("split_k"). In others, also older ones, the only reader is named after a product, and the
    partial sums have one dimension more than its result. Products that a library splits by itself (cuBLAS) are one
    kernel of the graph.
    """
    found = []
    for buffer in graph.buffers:
        writers, readers = graph.producers.get(buffer.name, ()), graph.consumers.get(buffer.name, ())
        if buffer.role != "intermediate" or len(writers) != 1 or graph.kernels is None:
            continue
        product = graph.kernels[writers[0]]
        parts = product.facts.get("split_k", 0)
        if not parts and len(readers) == 1 and is_product(product):
            sums = graph.kernels[readers[0]]
            parts = _parts(graph, buffer, sums) if _named_after_product(sums) else 0
        if parts:
            found += [SplitK(writers[0], reader, buffer.name, parts) for reader in readers]
    return found


def partial_sums(graph: FusionGraph) -> frozenset[str]:
    """Return the names of the buffers that hold partial sums."""
    return frozenset(split.buffer for split in split_products(graph))


def passed_on(graph: FusionGraph) -> list[Buffer]:
    """Return the buffers that one kernel writes and another reads, largest first, without partial sums."""
    sums = partial_sums(graph)
    return [b for b in graph.materialized if graph.consumers.get(b.name) and b.name not in sums]


def dense_ragged_products(graph: FusionGraph) -> dict[int, int | None]:
    """Return, by launch index, the number of groups; None if unknown. It is also the factor of superfluous FLOPs.

    XLA's own operation `ragged-dot` and grouped library calls skip the rows of other groups.
    """
    return {
        index: _groups(graph, kernel) for index, kernel in enumerate(graph.kernels or ())
        if _is_dense(kernel) and any(op.op in _RAGGED for op in kernel.source_ops)
    }


def described(graph: FusionGraph) -> dict[int, str]:
    """Return, by launch index, what a kernel does for a split-K product or a ragged one."""
    found: dict[int, str] = {}
    for split in split_products(graph):
        found[split.product] = f"split-K, {split.parts:,} partial sums of each element"
        found[split.sums] = f"adds up the partial sums of kernel {split.product + 1}"
    for index, groups in dense_ragged_products(graph).items():
        found[index] = "a ragged product computed densely" + (f", {groups:,} times its FLOPs" if groups else "")
    return found


def _named_after_product(kernel: Kernel) -> bool:
    return not may_multiply(kernel) and any(token(op.op) in PRODUCTS for op in kernel.source_ops)


def _parts(graph: FusionGraph, buffer: Buffer, sums: Kernel) -> int:
    """Return the partial sums of each element of the result; 0 where the shapes are not those of partial sums."""
    elements = math.prod(buffer.shape)
    for access in sums.outputs or ():
        made = math.prod(graph.buffer[access.buffer].shape)
        if made and elements % made == 0 and (parts := elements // made) > 1 and parts in buffer.shape:
            return parts
    return 0


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
    operands = [shape for shape in shapes if len(shape) >= _DIMENSIONS]
    found = lengths.intersection(*operands) if operands else set()
    return found.pop() if len(found) == 1 else None
