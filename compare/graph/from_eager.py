"""The fusion graph of eager PyTorch and of the libraries that it calls: one operation after another, each with the
kernels that it launched.

Which those are only a device tells: without one the graph has the operations, and the buffers that go between them,
and `kernels` is None. One operation reads and writes whole tensors, once. Where it launched several kernels, what goes
between them is not known: the first one reads its inputs, the last one writes its outputs, the rest is None.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from compare.graph.from_launches import Buffers, Sites, short, source_op
from compare.graph.join import MEMCPY, MEMSET, Record, duration_us
from compare.graph.model import Access, FusionGraph, Kernel, Kind, Part

if TYPE_CHECKING:
    from triton_side.dispatch import Operation, Recorded


def from_eager(
    recorded: Recorded,
    *,
    name: str,
    kernels: Mapping[str, Sequence[Sequence[Record]]] | None = None,
    compiler: str = "eager",
    target: str = "",
    versions: Mapping[str, str] | None = None,
) -> FusionGraph:
    """The graph of what triton_side.dispatch.record_call recorded.

    kernels: by part, for each operation what the GPU ran for it, in order.

    Raises:
        ValueError: `kernels` has a part with another number of operations, or hand-written launches were recorded,
            which `from_launches` is for.
    """
    buffers, sites = Buffers(recorded), Sites()
    operations, found = [], []
    for part, events in recorded.parts.items():
        joined = None if kernels is None else kernels.get(part, ())
        if joined is not None and len(joined) != len(events):
            raise ValueError(f"kernels must be given for each operation of {part}: {len(events)}, got {len(joined)}")
        for index, event in enumerate(events):
            if not hasattr(event, "op"):
                raise ValueError(f"{part} launches {event.label}, which PyTorch did not: use from_launches")
            operation = cast("Operation", event)
            source = source_op(operation, cast(Part, part), sites)
            operations.append(source)
            hint = short(operation.op)
            reads, writes = buffers.accesses(operation.reads, hint), buffers.accesses(operation.writes, hint)
            shared: dict[str, Any] = {"part": cast(Part, part), "source_ops": (source,)}
            for record in _placed(operation, joined[index] if joined is not None else (), reads, writes, shared):
                found.append(record)
    return FusionGraph(
        name, compiler, None if kernels is None else tuple(found), buffers.all(), operations=tuple(operations),
        versions=dict(versions or {}), target=target,
    )  # fmt: skip


def _placed(
    operation: Operation, records: Sequence[Record], reads: tuple[Access, ...], writes: tuple[Access, ...],
    shared: Mapping[str, Any],
) -> list[Kernel]:  # fmt: skip
    """The kernels of one operation. Beside others, a memset or a copy is the library's own business."""
    main = [i for i, record in enumerate(records) if record.name not in (MEMSET, MEMCPY)] or list(range(len(records)))
    kernels = []
    for index, record in enumerate(records):
        kind: Kind = {MEMSET: "memset", MEMCPY: "copy"}.get(record.name, operation.kind)  # type: ignore[assignment]
        scratch = record.name == MEMSET and index not in main
        inputs = reads if index == main[0] else () if scratch else None
        outputs = writes if index == main[-1] else () if scratch else None
        kernels.append(
            Kernel(
                name=operation.op, kind=kind, runtime_name=record.name, inputs=inputs, outputs=outputs,
                workspace_bytes=(getattr(record, "bytes", None) or 0) if scratch else 0,
                flops=operation.flops if index == main[0] and len(main) == 1 else None if index in main else 0.0,
                provenance="device", device_time_us=duration_us(record), **shared,
            )
        )  # fmt: skip
    return kernels
