"""Measured bytes: what ncu counted for a record's kernels, next to the bytes that the graph declares."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from .. import formats
from ..model import FusionGraph, Kernel

# A kernel's fact: {"alone": {"dram_read", "dram_written", "l2"}, "call": the same}, in bytes of all launches.
FACT = "counted"
_COUNTS = ("dram_read", "dram_written", "l2")


def with_measured_bytes(graph: FusionGraph, traffic: Mapping[str, Any]) -> FusionGraph:
    """Return the graph with the counts of `compare.record.record.Record.traffic` in its kernels' facts."""
    found: dict[int, dict[str, Any]] = {}
    for way, measured in traffic.items():
        for phase in (measured.get("parts") or {}).values():
            for each in phase["kernels"]:
                found.setdefault(each["kernel"], {})[way] = {count: each[count] for count in _COUNTS}
    if graph.kernels is None or not found:
        return graph
    kernels = (
        replace(kernel, facts={**kernel.facts, FACT: found[index]}) if index in found else kernel
        for index, kernel in enumerate(graph.kernels)
    )
    return replace(graph, kernels=tuple(kernels))


def lines(kernel: Kernel) -> list[str]:
    """Return "measured alone: reads 268 MB, writes 131 MB, 405 MB through L2", and the same for the call."""
    return [
        f"measured {'alone' if way == 'alone' else 'in the call'}: reads {formats.size(counts['dram_read'])}, "
        f"writes {formats.size(counts['dram_written'])}, {formats.size(counts['l2'])} through L2"
        for way, counts in kernel.facts.get(FACT, {}).items()
    ]
