"""The text of a kernel's box in a drawing: costs, operations and buffers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ....base.text import printable
from ....graph import formats
from ....graph.analyse.align import phase_of
from ....graph.analyse.roofline import Ceilings, recoverable_us, roofline_point
from ....graph.analyse.totals import declared_bytes, known_declared_bytes
from ....graph.model import Access, FusionGraph, Kernel
from ....graph.operations import kind_by_operations
from ....graph.render import text_view
from .bands import Band, belongs


def costs(
    graph: FusionGraph, kernel: Kernel, limits: Ceilings | None, declared: float | None, time: float | None,
    order: Mapping[str, int], product: str | None,
) -> dict[str, Any]:
    """Return a kernel's costs as text; times in µs, "" if unknown. A time with ~ is predicted.

    The browser adds up "us", which is unrounded and measured, and "declared", the known bytes. limits: of the device.
    declared, time: those of the whole graph, for shares. order: positions of buffers by name. product: as in
    `text_view.remarks`.
    """
    launch = kernel.launch
    point = None if limits is None or not limits.streams else roofline_point(graph, kernel, limits)
    took, roofline_us = kernel.device_time_us, point.roofline_time_us if point else None
    known = {
        "remarks": "; ".join(text_view.remarks(kernel, product)),
        "registers": launch.registers, "shared memory": _size(launch.shared_bytes),
        "spilled": _size(launch.local_bytes), "grid": launch.grid and list(launch.grid),
        "configuration": kernel.facts.get("config"),
        "predicted time": kernel.predicted and formats.predicted(kernel.predicted),
    }
    return {
        "name": formats.name(kernel.name, 200), "kind": kernel.kind, "work": kind_by_operations(kernel),
        "phase": kernel.phase, "us": None if took is None else repr(took),
        "declared": known_declared_bytes(kernel),
        "time": formats.number_of_us(took) or formats.about_us(kernel.predicted),
        "time_share": formats.share(kernel.predicted_us if took is None else took, time),
        "roofline_time": formats.number_of_us(roofline_us), "bound": point.bound if point else "",
        "recoverable": formats.number_of_us(recoverable_us(took, roofline_us)),
        "bytes": formats.size(declared_bytes(kernel)), "bytes_share": formats.share(declared_bytes(kernel), declared),
        "read": formats.size(kernel.bytes_read), "written": formats.size(kernel.bytes_written),
        "flops": "?" if kernel.flops is None else formats.flops(kernel.flops),
        "launches": "?" if kernel.launches is None else str(kernel.launches),
        "lines": [printable(line, 200) for line in kernel.lines],
        "reads": _accesses(graph, kernel.inputs, order), "writes": _accesses(graph, kernel.outputs, order),
        "facts": {name: printable(str(value), 200) for name, value in known.items() if value},
    }


def _size(count: Any) -> str | None:
    return formats.size(count) if isinstance(count, int) and count else None


def operations(kernel: Kernel, numbers: Iterable[int], bands: Sequence[Band]) -> dict[str, str]:
    """Return a kernel's operations as text by band; under "" those outside all bands."""
    by_band: dict[int, list[str]] = {number: [] for number in numbers}
    rest = []
    for op in kernel.source_ops:
        phase = phase_of(kernel, op)
        own = [i for i in by_band if bands[i].phase == phase and belongs(op.stage, bands[i].label)]
        if own:
            by_band[max(own, key=lambda i: len(bands[i].label))].append(formats.operation(op))
        else:
            rest.append(formats.operation(op))
    for number in by_band:
        if bands[number].row is None:
            by_band[number] += rest
            rest = []
    if rest and by_band and not any(by_band.values()):  # bands of matched operations have other names
        by_band[min(by_band)], rest = rest, []
    words = {str(number): formats.words(ops) for number, ops in by_band.items()}
    return words | ({"": formats.words(rest)} if rest else {})


def buffers(graph: FusionGraph) -> list[list[Any]]:
    """Return text, bytes and role of each buffer. Kernels and edges refer to buffers by position in this list."""
    return [
        [f"{formats.name(b.name, 60)} {formats.shape(b)} {formats.size(b.bytes)}", b.bytes, b.role]
        for b in graph.buffers
    ]


def _accesses(
    graph: FusionGraph, accesses: Sequence[Access] | None, order: Mapping[str, int]
) -> list[list[Any]] | None:
    """Return [buffer] for full accesses and [buffer, size] for partial ones, largest first; None if unknown."""
    if accesses is None:
        return None
    ordered = sorted(accesses, key=lambda access: -(access.bytes or 0))
    return [
        [order[a.buffer], *([] if a.bytes == graph.buffer[a.buffer].bytes else [formats.size(a.bytes)])]
        for a in ordered
    ]


def bytes_of(graph: FusionGraph, accesses: Sequence[Access] | None, roles: tuple[str, ...]) -> int:
    """Return the known bytes of a launch's accesses to buffers of these roles."""
    return sum(access.bytes or 0 for access in accesses or () if graph.buffer[access.buffer].role in roles)
