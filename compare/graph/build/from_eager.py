"""The fusion graph of eager PyTorch and of the libraries that it calls: operations with the kernels that they launched.

Only a device tells which kernels an operation launches. Without one, `kernels` is None, and the graph has only the
operations and the buffers between them. An operation is one kernel of the graph, even if it launched several: it reads
and writes whole tensors once, and no compiler could fuse into the library's own kernels.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, cast

from ..join.kernel_records import AFTER, BEFORE, MEMSET, Record, duration_us
from ..join.measured import measured
from ..model import Access, FusionGraph, Kernel, Launch, Phase, SourceOp
from .from_launches import Buffers, Sites, short, source_op

if TYPE_CHECKING:
    from xlafuse.triton_side.calls.dispatch import Operation, Recorded


def from_eager(
    recorded: Recorded,
    *,
    name: str,
    kernels: Mapping[str, Sequence[Sequence[Record]]] | None = None,
    compiler: str = "eager",
    target: str = "",
    versions: Mapping[str, str] | None = None,
) -> FusionGraph:
    """Return the graph of a call that `xlafuse.triton_side.calls.dispatch.record_call` recorded.

    kernels: by phase, the GPU's records of each operation, in order. The longest-running kernel gives `runtime_name`.
    `device_time_us` is the sum of all of them, and `facts["with"]` counts the others by name.

    Raises:
        ValueError: the recorded call contains hand-written launches (`from_launches` reads those), or `kernels` has a
            phase with another number of operations.
    """
    buffers, sites = Buffers(recorded), Sites()
    operations, found = [], []
    for phase, events in recorded.parts.items():
        joined = None if kernels is None else kernels.get(phase, ())
        if joined is not None and len(joined) != len(events):
            raise ValueError(f"kernels must be given for each operation of {phase}: {len(events)}, got {len(joined)}")
        for index, event in enumerate(events):
            if not hasattr(event, "op"):
                raise ValueError(f"{phase} launches {event.label}, which is not a PyTorch operation: use from_launches")
            operation = cast("Operation", event)
            source = source_op(operation, cast(Phase, phase), sites)
            operations.append(source)
            hint = short(operation.op)
            reads, writes = buffers.accesses(operation.reads, hint), buffers.accesses(operation.writes, hint)
            if joined is not None and joined[index]:
                found.append(_kernel(operation, cast(Phase, phase), source, joined[index], reads, writes))
    return FusionGraph(
        name, compiler, None if kernels is None else tuple(found), buffers.all(), operations=tuple(operations),
        versions=dict(versions or {}), target=target,
    )


def _kernel(
    operation: Operation, phase: Phase, source: SourceOp, records: Sequence[Record], reads: tuple[Access, ...],
    writes: tuple[Access, ...],
) -> Kernel:
    """Return the operation as a kernel, named by its longest-running one; `facts["with"]` counts the others.

    PyTorch splits an operation whose indices exceed 32 bits into several launches of one kernel, with equal shares.
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
    others = Counter(record.name for record in records if record.name != main)
    if repeats > launches:  # the shares are unequal
        others[main] = repeats - launches

    def share(accesses: tuple[Access, ...]) -> tuple[Access, ...]:
        if launches == 1:
            return accesses
        return tuple(Access(a.buffer, None if a.bytes is None else a.bytes // launches) for a in accesses)

    scratch = [getattr(record, "bytes", None) or 0 for record in records if record.name == MEMSET != main]
    return Kernel(
        name=operation.op, kind=operation.kind, phase=phase, source_ops=(source,), runtime_name=main,
        inputs=share(reads), outputs=share(writes),
        workspace_bytes=sum(scratch), launches=launches,
        flops=None if operation.flops is None else operation.flops / launches, provenance="device",
        device_time_us=sum(times.values()),
        launch=measured(Launch(), [record for record in records if record.name == main]),
        facts={"with": dict(others)} if others else {},
    )
