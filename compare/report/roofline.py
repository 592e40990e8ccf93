"""A run's blocks and kernels on the roofline: rows of kernels, and tables of both."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from ..base.text import number
from ..graph import formats
from ..graph.analyse.roofline import RooflinePoint, intensity, recoverable_us, roofline_point
from ..graph.analyse.totals import declared_bytes
from ..graph.model import Kernel, PredictedTime
from ..record.record import Record
from ..sources.result import Result
from ..sources.row import Row, ratio
from .columns import BY_NAME, IDENTITY, Column, of_row, predicted_columns
from .table import grouped

_TIMES = (
    "bound: limit of most of the time: memory, compute (products), or launch (kernels too short for both, and gaps).",
    "roofline µs: sum over the kernels of max(bytes / bandwidth, FLOPs / product rate), at measured ceilings; a TPU's",
    "are its data sheet's, and a GPU's that nothing was measured on are its data sheet's, scaled (docs/gpus.md).",
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
    "~: predicted, with the interval that holds the time in four of five kernels; only where nothing was measured.",
    "Blank: unknown for this kind of kernel, or nothing was fitted for the target (docs/predicted-times.md).",
)
_NAMES = (
    "implementation", "intensity_flop_per_byte", "intensity_measured", "bound", "gflop_per_s", "roofline_gflop_per_s",
    "device_time_us", "roofline_time_us", "share_of_roofline", "recoverable_us",
)
_SHOWN = tuple(replace(BY_NAME[name], cell=None) if name == "device_time_us" else BY_NAME[name] for name in _NAMES)


@dataclass(frozen=True)
class KernelOnRoofline:
    """One kernel of a graph.

    row: of the result. index: of the kernel's launch. dram_bytes, dram_bytes_call: ncu's counts over its launches,
    alone and within the call.
    """

    row: Row
    index: int
    kernel: Kernel
    point: RooflinePoint | None
    dram_bytes: int | None = None
    dram_bytes_call: int | None = None

    @property
    def predicted(self) -> PredictedTime | None:
        """The prediction for a kernel that was not measured."""
        return self.kernel.predicted if self.kernel.device_time_us is None else None

    @property
    def flops(self) -> float | None:
        flops, launches = self.kernel.flops, self.kernel.launches
        return None if flops is None or launches is None else flops * launches

    @property
    def roofline_time_us(self) -> float | None:
        return None if self.point is None else self.point.roofline_time_us

    @property
    def recoverable_us(self) -> float | None:
        """The device time above the roofline time."""
        return recoverable_us(self.kernel.device_time_us, self.roofline_time_us)


KERNEL_COLUMNS = (
    *map(of_row, (*IDENTITY, BY_NAME["segment"])),
    Column("index", "1", "number of the launch, from 0"),
    Column("phase", "", "forward or backward", "", lambda k: k.kernel.phase),
    Column(
        "kernel", "", "the compiler's name", "kernel", lambda k: k.kernel.name,
        lambda k: f"{k.index + 1}. {formats.name(k.kernel.name, 44)}",
    ),
    Column("runtime_name", "", "the profiler's name", "", lambda k: k.kernel.runtime_name),
    Column("kind", "", "sort of kernel, as reduction or product", "", lambda k: k.kernel.kind),
    Column(
        "launches", "launches", "launches in one call", "launches", lambda k: k.kernel.launches,
        lambda k: "" if k.kernel.launches == 1 else number(k.kernel.launches),
    ),
    Column("device_time_us", "µs", "device time of all launches", "time µs", lambda k: k.kernel.device_time_us),
    *predicted_columns(lambda line: line.predicted, "predicted device time where none was measured"),
    Column(
        "bytes_declared", "bytes", "bytes that it declares to move", "declared MB", lambda k: declared_bytes(k.kernel)
    ),
    Column("dram_bytes", "bytes", "ncu's count, from an empty L2"),
    Column("dram_bytes_call", "bytes", "ncu's count within the call", "measured MB"),
    Column("flops", "FLOP", "its own FLOPs"),
    Column(
        "intensity_flop_per_byte", "FLOP/byte", "flops over bytes_declared", "FLOP/B",
        lambda k: intensity(k.flops, declared_bytes(k.kernel)),
    ),
    Column(
        "intensity_measured", "FLOP/byte", "flops over dram_bytes_call", "measured FLOP/B",
        lambda k: intensity(k.flops, k.dram_bytes_call),
    ),
    Column(
        "bound", "", "memory, compute, link or launch", "bound", lambda k: None if k.point is None else k.point.bound
    ),
    Column(
        "roofline_time_us", "µs", "max(bytes / bandwidth, FLOPs / product rate, sent bytes / link rate)", "roofline µs"
    ),
    Column(
        "share_of_roofline", "share", "roofline_time_us over device_time_us", "of roofline",
        lambda k: ratio(k.roofline_time_us, k.kernel.device_time_us),
    ),
    Column("recoverable_us", "µs", "device_time_us above roofline_time_us", "recoverable µs"),
)
_KERNEL_NAMES = (
    "implementation", "kernel", "launches", "bytes_declared", "dram_bytes_call", "intensity_flop_per_byte",
    "intensity_measured", "bound", "device_time_us", "predicted_time_us", "roofline_time_us", "share_of_roofline",
    "recoverable_us",
)
_SHOWN_OF_KERNELS = tuple({column.name: column for column in KERNEL_COLUMNS}[name] for name in _KERNEL_NAMES)


render = partial(grouped, columns=_SHOWN, legend=LEGEND)
render_kernels = partial(grouped, columns=_SHOWN_OF_KERNELS, legend=KERNEL_LEGEND)


def kernels(result: Result, *, predict: bool = False) -> list[KernelOnRoofline]:
    """Return the kernels of a result's graph in launch order; none without a readable graph.

    predict: add the predicted times of kernels that were not measured.
    """
    graph, ceilings = result.graph, result.ceilings
    if graph is None:
        return []
    if predict and any(kernel.device_time_us is None for kernel in graph.kernels or ()):
        graph = result.predicted_graph or graph
    alone, call = (_dram_bytes(result.record, method) for method in ("alone", "call"))
    return [
        KernelOnRoofline(
            result.row, index, kernel, None if ceilings is None else roofline_point(graph, kernel, ceilings),
            alone.get(index), call.get(index),
        )
        for index, kernel in enumerate(graph.kernels or ())
    ]


def _dram_bytes(record: Record | None, method: str) -> dict[int, int]:
    """Return bytes by the kernel's index in the graph."""
    counts = ((record.traffic if record else None) or {}).get(method)
    phases = (counts and counts.phases) or {}
    return {
        kernel.kernel: kernel.dram_read + kernel.dram_written for phase in phases.values() for kernel in phase.kernels
    }
