"""The exchange between GPUs that a kernel of a graph makes: a collective of XLA or PyTorch, or a copy."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from xlafuse.hlo.link_traffic import bytes_sent, collective_of

from ..model import FusionGraph, Kernel

COPY = "copy between GPUs"  # by a copy engine, of hand-written Triton: "xlafuse.exchange.default"
# "_c10d_functional.all_reduce.default" in eager PyTorch; Inductor puts "torch.ops." before it and numbers behind it.
_IN_PYTORCH = re.compile(r"\b_c10d_functional\.(\w+)\.|\b(xlafuse\.exchange)\.")
_OF_PYTORCH = {
    "all_gather_into_tensor": "all-gather", "reduce_scatter_tensor": "reduce-scatter", "all_reduce": "all-reduce",
    "all_reduce_": "all-reduce", "all_to_all_single": "all-to-all", "xlafuse.exchange": COPY,
}


@dataclass(frozen=True)
class Exchange:
    """One launch of a collective, or one copy.

    gpus: how many exchange with each other. sent_bytes: by one of them, or received by it where these are more. The
    routing gives PyTorch's all-to-all rows of any sizes for each peer, which its graph does not tell: an equal share of
    the rows is taken. overlaps: XLA runs other kernels meanwhile.
    """

    opcode: str
    gpus: int
    sent_bytes: float
    overlaps: bool = False


def exchange_of(kernel: Kernel) -> Exchange | None:
    """Return what a kernel exchanges; None for another kernel, or where its bytes or GPUs are not known."""
    read = kernel.bytes_read
    if kernel.kind != "collective" or read is None:
        return None
    opcode, gpus = _opcode(kernel), kernel.facts.get("gpus")
    if opcode == COPY:
        return Exchange(COPY, 2, float(read))
    if opcode is None or not isinstance(gpus, int) or not gpus:
        return None
    operand = max(read, kernel.bytes_written or 0) if opcode == "all-to-all" else read
    return Exchange(opcode, gpus, bytes_sent(opcode, operand, gpus), bool(kernel.facts.get("overlaps")))


def _opcode(kernel: Kernel) -> str | None:
    if found := _IN_PYTORCH.search(kernel.name):
        return _OF_PYTORCH.get(found[1] or found[2])
    facts = kernel.facts
    return collective_of(map(str, (facts.get("opcode"), *facts.get("opcodes", ()))))


def between(graph: FusionGraph, gpus: int) -> FusionGraph:
    """Return the graph with the number of GPUs that exchange with each other in its collectives, as PyTorch's lack."""
    if graph.kernels is None:
        return graph
    kernels = (
        replace(kernel, facts={"gpus": gpus, **kernel.facts}) if kernel.kind == "collective" else kernel
        for kernel in graph.kernels
    )
    return replace(graph, kernels=tuple(kernels))
