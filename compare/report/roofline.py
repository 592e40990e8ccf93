"""A run's blocks and kernels on the roofline: rows of kernels, and tables of both."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..base.text import number
from ..graph import formats
from ..graph.analyse.roofline import Ceilings, RooflinePoint, intensity, recoverable_us, roofline_point
from ..graph.analyse.totals import declared_bytes
from ..graph.model import FusionGraph, Kernel
from ..record.record import Record
from ..sources.graph_sources import GraphSource
from .columns import BY_NAME, IDENTITY, Column, Row, row_of
from .record_values import RecordValues, ratio
from .rows import id_of
from .table import grouped

_TIMES = (
    "bound: limit of most of the time: memory, compute (products), or launch (kernels too short for both, and gaps).",
    "roofline µs: sum over the kernels of max(bytes / bandwidth, FLOPs / product rate), at measured ceilings; a TPU's",
    "are its data sheet's.",
)
LEGEND = (
    "FLOP/B: model FLOPs over the bytes that the kernels declare; measured: over the bytes that ncu counted in a call.",
    *_TIMES,
    "roofline GFLOP/s: model FLOPs over the roofline time. of roofline: the roofline time over the device time.",
    "recoverable: time of the kernels above their roofline times.",
)
KERNEL_LEGEND = (
    "FLOP/B: a kernel's own FLOPs over its declared bytes; measured: over the bytes that ncu counted in a call. Blank",
    "where its FLOPs are not known. of roofline: the roofline time over the device time. recoverable: the rest.",
    *_TIMES,
)
_NAMES = (
    "implementation", "intensity_flop_per_byte", "intensity_measured", "bound", "gflop_per_s", "roofline_gflop_per_s",
    "device_time_us", "roofline_time_us", "share_of_roofline", "recoverable_us",
)
_SHOWN = tuple(replace(BY_NAME[name], cell=None) if name == "device_time_us" else BY_NAME[name] for name in _NAMES)
_NONE: Mapping[int, int] = {}


@dataclass(frozen=True)
class _KernelValues:
    """One kernel of a graph.

    index: of its launch. dram_bytes, dram_bytes_call: ncu's counts over its launches, alone and within the call.
    """

    index: int
    kernel: Kernel
    point: RooflinePoint | None
    dram_bytes: int | None = None
    dram_bytes_call: int | None = None

    @property
    def flops(self) -> float | None:
        flops, launches = self.kernel.flops, self.kernel.launches
        return None if flops is None or launches is None else flops * launches

    @property
    def roofline_time_us(self) -> float | None:
        return None if self.point is None else self.point.roofline_time_us


_RECORD_COLUMNS = (*IDENTITY, BY_NAME["segment"])
_GRAPH_COLUMNS = (
    Column("index", "1", "number of the launch, from 0", "", lambda k: k.index),
    Column("part", "", "forward or backward", "", lambda k: k.kernel.phase),
    Column(
        "kernel", "", "the compiler's name", "kernel", lambda k: k.kernel.name,
        lambda row: f"{row['index'] + 1}. {formats.name(row['kernel'], 44)}",
    ),
    Column("runtime_name", "", "the profiler's name", "", lambda k: k.kernel.runtime_name),
    Column("kind", "", "sort of kernel, as reduction or product", "", lambda k: k.kernel.kind),
    Column(
        "launches", "launches", "launches in one call", "launches", lambda k: k.kernel.launches,
        lambda row: "" if row["launches"] == 1 else number(row["launches"]),
    ),
    Column("device_time_us", "µs", "device time of all launches", "time µs", lambda k: k.kernel.device_time_us),
    Column(
        "bytes_declared", "bytes", "bytes that it declares to move", "declared MB", lambda k: declared_bytes(k.kernel)
    ),
    Column("dram_bytes", "bytes", "ncu's count, from an empty L2", "", lambda k: k.dram_bytes),
    Column("dram_bytes_call", "bytes", "ncu's count within the call", "measured MB", lambda k: k.dram_bytes_call),
    Column("flops", "FLOP", "its own FLOPs", "", lambda k: k.flops),
    Column(
        "intensity_flop_per_byte", "FLOP/byte", "flops over bytes_declared", "FLOP/B",
        lambda k: intensity(k.flops, declared_bytes(k.kernel)),
    ),
    Column(
        "intensity_measured", "FLOP/byte", "flops over dram_bytes_call", "measured FLOP/B",
        lambda k: intensity(k.flops, k.dram_bytes_call),
    ),
    Column("bound", "", "memory, compute or launch", "bound", lambda k: None if k.point is None else k.point.bound),
    Column(
        "roofline_time_us", "µs", "max(bytes / bandwidth, FLOPs / product rate)", "roofline µs",
        lambda k: k.roofline_time_us,
    ),
    Column(
        "share_of_roofline", "share", "roofline_time_us over device_time_us", "of roofline",
        lambda k: ratio(k.roofline_time_us, k.kernel.device_time_us),
    ),
    Column(
        "recoverable_us", "µs", "device_time_us above roofline_time_us", "recoverable µs",
        lambda k: recoverable_us(k.kernel.device_time_us, k.roofline_time_us),
    ),
)
KERNEL_COLUMNS = (*_RECORD_COLUMNS, *_GRAPH_COLUMNS)
_KERNEL_NAMES = (
    "implementation", "kernel", "launches", "bytes_declared", "dram_bytes_call", "intensity_flop_per_byte",
    "intensity_measured", "bound", "device_time_us", "roofline_time_us", "share_of_roofline", "recoverable_us",
)
_SHOWN_OF_KERNELS = tuple({column.name: column for column in KERNEL_COLUMNS}[name] for name in _KERNEL_NAMES)


def render(rows: list[Row], *, markdown: bool = False) -> str:
    return grouped(rows, lambda rows: _SHOWN, LEGEND, markdown=markdown)


def render_kernels(rows: list[Row], *, markdown: bool = False) -> str:
    return grouped(rows, lambda rows: _SHOWN_OF_KERNELS, KERNEL_LEGEND, markdown=markdown)


def kernels(sources: Sequence[GraphSource], rows: Iterable[Row]) -> Iterator[Row]:
    """Return a row for each kernel of the rows' records, in launch order. Raises UsageError for an unreadable graph."""
    wanted = set(map(id_of, rows))
    for each in sources:
        record = each.record
        if record is None or each.read is None or record.id not in wanted:
            continue
        own = row_of(RecordValues(record, None), _RECORD_COLUMNS)
        graph = each.graph()
        ceilings, _ = each.ceilings_for(graph, None)
        alone, call = _dram_bytes(record, "alone"), _dram_bytes(record, "call")
        for row in kernels_of_graph(graph, ceilings, alone, call):
            yield own | row


def kernels_of_graph(
    graph: FusionGraph, ceilings: Ceilings | None, alone: Mapping[int, int] = _NONE, call: Mapping[int, int] = _NONE
) -> Iterator[Row]:
    """Yield a row for each kernel of a graph, in launch order, without the columns about a record.

    alone, call: ncu's bytes by launch index, of each kernel alone and within the call.
    """
    for index, kernel in enumerate(graph.kernels or ()):
        point = roofline_point(graph, kernel, ceilings) if ceilings is not None and ceilings.streams else None
        yield row_of(_KernelValues(index, kernel, point, alone.get(index), call.get(index)), _GRAPH_COLUMNS)


def _dram_bytes(record: Record, method: str) -> dict[int, int]:
    """By index in the graph."""
    found: Any = (record.traffic or {}).get(method, {})
    return {
        each["kernel"]: each["dram_read"] + each["dram_written"]
        for part in found.get("parts", {}).values() for each in part["kernels"]
    }
