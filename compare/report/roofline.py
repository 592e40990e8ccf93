"""A run's blocks and kernels on the roofline: rows of kernels, and tables of both."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from ..base.text import number, printable
from ..graph import formats
from ..graph.analyse.roofline import RooflinePoint, intensity, recoverable_us, roofline_point
from ..graph.analyse.totals import declared_bytes
from ..graph.model import Kernel
from ..record.record import Record
from ..sources.graph_sources import GraphSource
from .rows import Row, id_of
from .table import Columns, grouped, mega, percent

LEGEND = (
    "FLOP/B: model FLOPs over the bytes that the kernels move, as declared; counted: over what ncu counted in a call.",
    "bound: what holds most of the time: memory, compute (products), or launch (kernels too short for both, and gaps).",
    "least µs: the larger of bytes over bandwidth and FLOPs over product rate, kernel by kernel, at measured ceilings.",
    "attainable: model FLOPs over the least time. reached: the least time over the measured one.",
    "recoverable: what the kernels took above their least times.",
)
KERNEL_LEGEND = (
    "FLOP/B: a kernel's own FLOPs over its bytes, as declared; counted: over what ncu counted in a call. Empty where",
    "nobody knows its FLOPs. reached: the least time over the measured one. recoverable: what is above it.",
    *LEGEND[1:3],
)


def render(rows: list[Row], *, markdown: bool = False) -> str:
    return grouped(rows, lambda rows: _COLUMNS, LEGEND, markdown=markdown)


def render_kernels(rows: list[Row], *, markdown: bool = False) -> str:
    return grouped(rows, lambda rows: _KERNEL_COLUMNS, KERNEL_LEGEND, markdown=markdown)


_LEAST: Columns = {
    "FLOP/B": lambda r: number(r["intensity_flop_per_byte"]),
    "counted": lambda r: number(r["intensity_measured"]),
    "bound": lambda r: r["bound"] or "",
}
_RECOVERABLE: Columns = {
    "time µs": lambda r: number(r["device_time_us"]),
    "least µs": lambda r: number(r["floor_us"]),
    "reached": lambda r: percent(r["share_of_attainable"]),
    "recoverable µs": lambda r: number(r["recoverable_us"]),
}
_COLUMNS: Columns = {
    "implementation": lambda r: printable(str(r["implementation"]), 40),
    **_LEAST,
    "GFLOP/s": lambda r: number(r["gflop_per_s"]),
    "attainable GFLOP/s": lambda r: number(r["attainable_gflop_per_s"]),
    **_RECOVERABLE,
}
_KERNEL_COLUMNS: Columns = {
    "implementation": _COLUMNS["implementation"],
    "kernel": lambda r: f"{r['index'] + 1}. {formats.name(r['kernel'], 44)}",
    "launches": lambda r: "" if r["launches"] == 1 else number(r["launches"]),
    "moved MB": lambda r: mega(r["bytes_moved"]),
    "counted MB": lambda r: mega(r["dram_bytes_call"]),
    **_LEAST,
    **_RECOVERABLE,
}


def kernels(found: Sequence[GraphSource], rows: Iterable[Row]) -> Iterator[Row]:
    """A row for each kernel of those records that `rows` are of, in launch order; what is not known is None.

    index: of the launch. dram_bytes, dram_bytes_call: of all its launches, as ncu counted them. Raises UsageError for a
    graph that cannot be read.
    """
    wanted = set(map(id_of, rows))
    for each in found:
        if each.record is None or each.read is None or each.record.id not in wanted:
            continue
        graph = each.graph()
        ceilings, _ = each.ceilings_for(graph, None)
        alone, call = _counted(each.record, "alone"), _counted(each.record, "call")
        for index, kernel in enumerate(graph.kernels or ()):
            where = None
            if ceilings is not None and ceilings.streams:
                where = roofline_point(graph, kernel, ceilings)
            counted = {"dram_bytes": alone.get(index), "dram_bytes_call": call.get(index)}
            yield {**_identity(each.record), "index": index, **_row(kernel, where, counted)}


def _identity(record: Record) -> Row:
    case = record.case
    return {
        "block": case.block, "case": case.name, "direction": case.direction, "dtype": case.dtype,
        "precision": case.precision, "implementation": record.implementation, "segment": record.segment,
    }


def _row(kernel: Kernel, where: RooflinePoint | None, counted: dict[str, int | None]) -> Row:
    time = kernel.device_time_us
    floor = None if where is None else where.roofline_time_us
    launches = kernel.launches
    flops = None if kernel.flops is None or launches is None else kernel.flops * launches
    moved = declared_bytes(kernel)
    return {
        "part": kernel.phase, "kernel": kernel.name, "runtime_name": kernel.runtime_name, "kind": kernel.kind,
        "launches": launches, "device_time_us": time, "bytes_moved": moved, **counted, "flops": flops,
        "intensity_flop_per_byte": intensity(flops, moved),
        "intensity_measured": intensity(flops, counted["dram_bytes_call"]),
        "bound": None if where is None else where.bound,
        "floor_us": floor,
        "share_of_attainable": floor / time if floor is not None and time else None,
        "recoverable_us": recoverable_us(time, floor),
    }


def _counted(record: Record, way: str) -> dict[int, int]:
    """DRAM bytes by launch index."""
    parts: dict[str, Any] = ((record.traffic or {}).get(way) or {}).get("parts") or {}
    return {
        each["kernel"]: each["dram_read"] + each["dram_written"] for part in parts.values() for each in part["kernels"]
    }
