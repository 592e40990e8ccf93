"""Facts of kernels from what a GPU ran: the launch that records tell, and the bytes that ncu counts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ...record.record_fields import Traffic
from ..model import FusionGraph, Launch

# The key in Kernel.facts. The value is {"alone": counts, "call": counts}, the bytes of all launches of the kernel.
COUNTED = "counted"
_COUNTS = ("dram_read", "dram_written", "l2")
_RECORDED = ("grid", "block", "registers", "shared_bytes", "local_bytes")


def measured(stated: Launch, records: Sequence[Any]) -> Launch:
    """Return the launch that a kernel's records agree on.

    records: of the kernel itself, without its helpers. stated: by the compiler, for what no record tells. It describes
    other code if the GPU ran the kernel as the driver's copy or memset, or with another grid or block, as after another
    autotuning. Then nothing of it is kept.
    """
    known = {name: [getattr(record, name, None) for record in records] for name in _RECORDED}
    found = agreed(known)
    others = any(
        getattr(stated, name) is not None and any(value not in (None, getattr(stated, name)) for value in known[name])
        for name in ("grid", "block")
    )
    if others or any(getattr(record, "bytes", None) is not None for record in records):
        return found
    unsaid = {name: getattr(stated, name) for name, values in known.items() if set(values) == {None}}
    return replace(found, config=stated.config, **unsaid)


def agreed(values: Mapping[str, Iterable[Any]]) -> Launch:
    """Return a launch from each field's values in all launches: one value, or all of them under `differing`."""
    once = {name: list(dict.fromkeys(each)) for name, each in values.items()}
    differing = {name: found for name, found in once.items() if len(found) > 1}
    return Launch(
        **{name: found[0] for name, found in once.items() if len(found) == 1}, differing=differing or None
    )


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
        replace(kernel, facts={**kernel.facts, COUNTED: found[index]}) if index in found else kernel
        for index, kernel in enumerate(graph.kernels)
    )
    return replace(graph, kernels=tuple(kernels))
