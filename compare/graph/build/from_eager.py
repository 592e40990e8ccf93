"""The fusion graph of eager PyTorch and of the libraries that it calls: one operation after another, each with the
kernels that it launched.

Which those are only a device tells: without one the graph has the operations, and the buffers that go between them,
and `kernels` is None. One operation reads and writes whole tensors, once, and is one kernel of the graph: where it
launched several, what goes between them is the library's own business, and nobody could fuse into it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from ..join.kernel_records import AFTER, BEFORE, MEMSET, Record, duration_us
from ..model import Access, FusionGraph, Kernel, Phase
from .from_launches import Buffers, Sites, short, source_op

if TYPE_CHECKING:
    from triton_side.calls.dispatch import Operation, Recorded


def from_eager(
    recorded: Recorded,
    *,
    name: str,
    kernels: Mapping[str, Sequence[Sequence[Record]]] | None = None,
    compiler: str = "eager",
    target: str = "",
    versions: Mapping[str, str] | None = None,
) -> FusionGraph:
    """The graph of what triton_side.calls.dispatch.record_call recorded.

    kernels: by phase, the GPU's records of each operation, in order. The longest-running kernel gives `runtime_name`.
    `device_time_us` is the sum of all of them, and `facts["with"]` counts the others by name.

    Raises:
        ValueError: `kernels` has a phase with another number of operations, or hand-written launches were recorded,
            which `from_launches` is for.
    """
    buffers, sites = Buffers(recorded), Sites()
    operations, found = [], []
    for phase, events in recorded.parts.items():
        joined = None if kernels is None else kernels.get(phase, ())
        if joined is not None and len(joined) != len(events):
            raise ValueError(f"kernels must be given for each operation of {phase}: {len(events)}, got {len(joined)}")
        for index, event in enumerate(events):
            if not hasattr(event, "op"):
                raise ValueError(f"{phase} launches {event.label}, which PyTorch did not: use from_launches")
            operation = cast("Operation", event)
            source = source_op(operation, cast(Phase, phase), sites)
            operations.append(source)
            hint = short(operation.op)
            reads, writes = buffers.accesses(operation.reads, hint), buffers.accesses(operation.writes, hint)
            shared: dict[str, Any] = {"phase": cast(Phase, phase), "source_ops": (source,)}
            if joined is not None and joined[index]:
                found.append(_placed(operation, joined[index], reads, writes, shared))
    return FusionGraph(
        name, compiler, None if kernels is None else tuple(found), buffers.all(), operations=tuple(operations),
        versions=dict(versions or {}), target=target,
    )


def _placed(
    operation: Operation, records: Sequence[Record], reads: tuple[Access, ...], writes: tuple[Access, ...],
    shared: Mapping[str, Any],
) -> Kernel:
    """The kernel that took the longest stands for the operation, and what the library runs beside it is in `with`.

    PyTorch cuts an operation whose indices do not fit into 32 bits into launches of one kernel, each over its share.
    """
    times: dict[str, float] = {}
    for record in records:
        times[record.name] = times.get(record.name, 0.0) + duration_us(record)
    helpers = {name for name in times if BEFORE.search(name) or AFTER.search(name)}
    main = max((name for name in times if name not in helpers), key=times.__getitem__, default=records[0].name)
    repeats = sum(record.name == main for record in records)
    sizes = [access.bytes for access in (*reads, *writes)]
    even = operation.flops is None or operation.flops % repeats == 0
    launches = repeats if even and all(size is not None and size % repeats == 0 for size in sizes) else 1
    beside = Counter(record.name for record in records if record.name != main)
    if repeats > launches:  # no equal shares
        beside[main] = repeats - launches

    def share(accesses: tuple[Access, ...]) -> tuple[Access, ...]:
        return tuple(Access(a.buffer, None if a.bytes is None else a.bytes // launches) for a in accesses)

    scratch = [getattr(record, "bytes", None) or 0 for record in records if record.name == MEMSET != main]
    return Kernel(
        name=operation.op, kind=operation.kind, runtime_name=main, inputs=share(reads), outputs=share(writes),
        workspace_bytes=sum(scratch), launches=launches,
        flops=None if operation.flops is None else operation.flops / launches, provenance="device",
        device_time_us=sum(times.values()), facts={"with": dict(beside)} if beside else {}, **shared,
    )
