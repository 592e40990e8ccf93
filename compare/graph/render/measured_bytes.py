"""Measured bytes: ncu's counts for a record's kernels, shown next to the bytes that the graph declares."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ...record.record_fields import Traffic
from .. import formats
from ..model import FusionGraph, Kernel

# The key in Kernel.facts. The value is {"alone": counts, "call": counts}, the bytes of all launches of the kernel.
FACT = "counted"
_COUNTS = ("dram_read", "dram_written", "l2")


def with_measured_bytes(graph: FusionGraph, traffic: Mapping[str, Traffic]) -> FusionGraph:
    """Return the graph with the counts in its kernels' facts. traffic: of its record."""
    found: dict[int, dict[str, Any]] = {}
    for method, measured in traffic.items():
        for phase in (measured.phases or {}).values():
            for counted in phase.kernels:
                found.setdefault(counted.kernel, {})[method] = {count: getattr(counted, count) for count in _COUNTS}
    if graph.kernels is None or not found:
        return graph
    kernels = (
        replace(kernel, facts={**kernel.facts, FACT: found[index]}) if index in found else kernel
        for index, kernel in enumerate(graph.kernels)
    )
    return replace(graph, kernels=tuple(kernels))


def lines(kernel: Kernel) -> list[str]:
    """Return a line for each method, such as "measured alone: reads 268 MB, writes 131 MB, 405 MB through L2"."""
    return [
        f"measured {'alone' if method == 'alone' else 'in the call'}: reads {formats.size(counts['dram_read'])}, "
        f"writes {formats.size(counts['dram_written'])}, {formats.size(counts['l2'])} through L2"
        for method, counts in kernel.facts.get(FACT, {}).items()
    ]
