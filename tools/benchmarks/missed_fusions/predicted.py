"""The saving of a fusion by predicted times, which docs/predicted-times.md holds against the price and the truth."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from xlafuse.compare.graph.model import Access, FusionGraph, Kernel
from xlafuse.compare.predict.features import Device
from xlafuse.compare.predict.predictor import Prediction, predicted

_MAIN = ("gemm", "reduction", "elementwise", "copy")  # a kernel of the first of these kinds keeps its tiles and launch


def saved_us(graph: FusionGraph, device: Device, members: Collection[int]) -> float | None:
    """Return the predicted time of some kernels minus that of one kernel instead; None where one is unknown."""
    kernels = tuple((graph.kernels or ())[index] for index in sorted(members))
    if any(kernel.kind not in _MAIN for kernel in kernels):
        return None
    versions = kernels, (_as_one(graph, kernels, set(members)),)
    found = [each for some in versions for each in predicted(replace(graph, kernels=some), device)]
    known = [each.time_us for each in found if isinstance(each, Prediction)]
    return sum(known[:-1]) - known[-1] if len(known) == len(found) else None


def _as_one(graph: FusionGraph, kernels: Sequence[Kernel], members: set[int]) -> Kernel:
    """Return a kernel with all of the operations, without the arrays that only pass between these kernels."""
    main = min(kernels, key=lambda kernel: _MAIN.index(kernel.kind))
    flops = [kernel.flops for kernel in kernels]
    opcodes = [opcode for kernel in kernels for opcode in kernel.facts.get("opcodes", ())]
    passed = {
        buffer.name for buffer in graph.materialized
        if buffer.role == "intermediate" and members.issuperset(graph.consumers.get(buffer.name, (None,)))
    }
    made = {access.buffer for kernel in kernels for access in kernel.outputs or ()}
    return replace(
        main, source_ops=tuple(dict.fromkeys(op for kernel in kernels for op in kernel.source_ops)),
        inputs=_largest(kernels, "inputs", made), outputs=_largest(kernels, "outputs", passed),
        flops=None if None in flops else sum(filter(None, flops)),
        facts={**main.facts, "opcodes": opcodes} if "opcodes" in main.facts else main.facts,
    )


def _largest(kernels: Sequence[Kernel], side: str, without: Collection[str]) -> tuple[Access, ...]:
    """Return the largest access of each buffer."""
    found: dict[str, Access] = {}
    for access in (access for kernel in kernels for access in getattr(kernel, side) or ()):
        if access.buffer not in without and (access.bytes or 0) >= (found.get(access.buffer, access).bytes or 0):
            found[access.buffer] = access
    return tuple(found.values())
