"""The columns of `xlafuse report`: tables, the page, --json, --csv and docs/report-data.md are all made from them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ..base.text import number, printable
from ..plan.paired_rounds import BASELINE, TIMER_NAMES, column_prefix, device_time_us
from ..plan.peers import PEERS
from ..plan.timing_modes import MAIN
from ..record.record_fields import RankFields
from ..spec.dtype import DTYPES
from .record_values import RecordValues, ratio

Row = dict[str, Any]


@dataclass(frozen=True)
class Column:
    """One column.

    name: its key in rows, --json and --csv. unit: "" for text. doc: its meaning, for docs/report-data.md and the page.
    header: its heading in tables; bytes are shown in MB. value: makes it from a RecordValues, or from another
    table's values; None where the baseline's row is needed, too. cell: makes its text in tables; None: by the unit.
    """

    name: str
    unit: str
    doc: str
    header: str = ""
    value: Callable[[Any], Any] | None = None
    cell: Callable[[Row], str] | None = None

    def text(self, row: Row) -> str:
        """Return the cell of a table."""
        if self.cell is not None:
            return self.cell(row)
        value = row[self.name]
        if self.unit == "bytes":
            return mega(value)
        if self.unit == "share":
            return percent(value)
        if self.unit:
            return number(value)
        return "" if value is None else printable(str(value), 40)


# Characters next to a time: the column that counts the rounds, and the meaning.
_MARKS = {
    "!": ("throttled_rounds", "in some round the GPU reported that it was throttled."),
    "~": ("unsettled_rounds", "in some round the times still changed when the warm-up ended."),
}


def marks(row: Row) -> str:
    """Return one character for each remark on the rounds of a time."""
    return "".join(mark for mark, (name, _) in _MARKS.items() if row[name])


def marks_explained(rows: Sequence[Row]) -> list[str]:
    """Return a line for each mark that some row has."""
    return [f"{mark}: {meaning}" for mark, (name, meaning) in _MARKS.items() if any(row[name] for row in rows)]


def mega(value: float | None) -> str:
    """Return millions, for bytes to be shown in MB."""
    return number(None if value is None else value / 1e6)


def percent(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"


def error_ratio(row: Row) -> float | None:
    """Return the error over its tolerance."""
    return ratio(row["max_error"], row["tolerance"])


def _time(row: Row) -> str:
    return " ".join(filter(None, [number(row["device_time_us"]), marks(row)]))


def _gap(row: Row) -> str:
    return percent(row["launch_gap"]) if (row["launch_gap"] or 0) >= 0.005 else ""


def _rate(row: Row) -> str:
    return "" if row["rate"] is None else f"{number(row['rate'])} {row['rate_unit']}"


def memory(row: Row) -> str:
    """Return the peak memory in MB, with a p where XLA's compiler planned it and nothing measured it."""
    planned = row["peak_memory_planned_bytes"]
    return mega(row["peak_memory_bytes"]) if planned is None else f"{mega(planned)} p"


def _error(row: Row) -> str:
    error, tolerance = row["max_error"], row["tolerance"]
    if error is None:
        return ""
    if not math.isfinite(error):
        return str(error)
    return f"{error / tolerance:.2f}" if tolerance else f"{error:.1e} of 0"


def checked_on(row: Row) -> str:
    """Return the device of the check, with its dtype where that is not the case's own, and Triton's interpreter."""
    device, dtype = row["checked_device"], row["checked_dtype"]
    if device is None:
        return ""
    remarks = ["interpreter"] if row["checked_backend"] == "interpreter" else []
    if dtype not in (None, row["dtype"]):
        remarks.append(DTYPES[dtype].short if dtype in DTYPES else dtype)
    return printable(f"{device} ({', '.join(remarks)})" if remarks else device, 40)


def _provenance(row: Row) -> str:
    return "" if row["provenance"] in (None, "compiled") else printable(row["provenance"], 40)


def exposed_us(rank: RankFields) -> float | None:
    return None if rank["alone_device_time"] is None else (rank["device_time"] - rank["alone_device_time"]) * 1e6


def _checked(name: str) -> Callable[[RecordValues], Any]:
    return lambda v: (v.record.checked or {}).get(name)


def _in_mode(mode: str) -> Callable[[RecordValues], Any]:
    return lambda v: device_time_us(v.record, mode)


def _worst(name: str) -> Callable[[RecordValues], Any]:
    return lambda v: None if v.worst_error is None else v.worst_error[name]  # type: ignore[literal-required]


IDENTITY = (
    Column("block", "", "the computation", "block", lambda v: v.case.block),
    Column("case", "", "the name of its sizes", "case", lambda v: v.case.name),
    Column(
        "direction", "", "fwd: inference. train: forward and backward. joint: both in one program", "direction",
        lambda v: v.case.direction,
    ),
    Column("dtype", "", "type of the inputs", "dtype", lambda v: v.case.dtype),
    Column("precision", "", "precision of float32 products", "", lambda v: v.case.precision),
    Column("implementation", "", "whose code", "implementation", lambda v: v.record.implementation),
)
_MODE_DOCS = {
    "warm": "from a warm L2", "graph": "with all launches replayed from CUDA graphs",
    "no-graph": "with each kernel launched by itself, where the default replays graphs",
}

COLUMNS = (
    *IDENTITY,
    Column("compiler", "", "xla, inductor, triton, ...", "", lambda v: v.record.compiler),
    Column(
        "status", "",
        "ok: executed and checked. compiled: for a GPU that was not there. wrong, failed, skipped, timeout: see detail",
        "status", lambda v: v.record.status,
    ),
    Column("detail", "", "why the status is neither ok nor compiled", "detail", lambda v: v.record.detail),
    Column("checked_device", "", "device of the numerical check", "checked on", _checked("device"), checked_on),
    Column("checked_backend", "", "backend of the check, as Triton's interpreter", "", _checked("backend")),
    Column("checked_dtype", "", "dtype of the check", "", _checked("dtype")),
    Column("checked_case", "", "case of the check", "", _checked("case")),
    Column("target", "", "GPU or TPU compiled for, where this machine has none", "", lambda v: v.record.target),
    Column(
        "segment", "",
        "stretch of the run with one environment and its own ceilings; times of two segments are never compared",
        "segment", lambda v: v.record.segment,
    ),
    Column(
        "timer", "", "clock of the device times: cupti or cuda-events", "",
        lambda v: v.measurement["timer"] if v.parts else None,
    ),
    Column(
        "kernels", "launches", "kernels, copies and memsets of one call; as the compiler lists them where nothing ran",
        "kernels", lambda v: v.kernels,
    ),
    Column(
        "kernel_source", "",
        "source of `kernels`: measured launches, or compiler, as where CUDA events took the times and saw no kernel",
        "", lambda v: v.kernel_source,
    ),
    Column(
        "device_time_us", "µs",
        "device time of a call from a cold L2: median over all rounds, without the first call of each; of train, "
        "forward plus backward",
        "time µs", lambda v: v.device_time_us, _time,
    ),
    Column(
        "device_time_us_spread", "µs",
        "half the interquartile range of a call's device time over the same calls: noise within a round and "
        "drift between rounds; empty below four samples",
        "±", lambda v: v.spread_us, lambda row: number(row["device_time_us_spread"], 2),
    ),
    Column(
        "recorded_time_us", "µs",
        "device time that the target's GPU took for the same kernels, of a run that is recorded in its target pack",
        "recorded µs", lambda v: (v.record.recorded or {}).get("device_time_us"),
    ),
    Column(
        "recorded_time_reason", "", "why a compile for a target shows no recorded time", "",
        lambda v: (v.record.recorded or {}).get("unavailable"),
    ),
    Column("forward_us", "µs", "median device time of forward", "forward", lambda v: v.part_us("forward")),
    Column("backward_us", "µs", "median device time of backward", "backward", lambda v: v.part_us("backward")),
    Column(
        "busy_time_us", "µs", "median time in which some kernel ran; empty where CUDA events took the times", "",
        lambda v: v.busy_time_us,
    ),
    Column(
        "wall_time_us", "µs", "host time of a call without the timer, median over rounds", "wall µs",
        lambda v: v.wall_time_us,
    ),
    Column(
        "time_vs_xla", "ratio",
        f"device_time_us over that of {BASELINE} on the same case, in the same segment, by the same timer; empty where "
        "the workers' clocks disagree",
    ),
    Column(
        "verdict_vs_xla", "", f"comparison with {BASELINE} from paired rounds, in words, with its 95% interval",
        "compared with xla", cell=lambda row: row["verdict_vs_xla"] or "",
    ),
    Column(
        "verdict_vs_xla_low", "ratio",
        "lower end of the 95% interval of the time over xla's, from paired rounds; below 1 is faster. Where "
        "`verdict_vs_xla` says faster, its words give the inverse",
    ),
    Column("verdict_vs_xla_high", "ratio", "upper end of that interval"),
    Column(
        "verdict_vs_xla_word", "",
        "faster, slower, tie, unresolved, or depends on the timer: two timers name opposite winners",
        "compared with xla",
    ),
    *(
        column
        for kind, which in PEERS.items()
        for column in (
            Column(f"best_{kind}", "", f"for the project's own kernels: the fastest {which}, by device time"),
            Column(f"ratio_to_best_{kind}", "ratio", "device_time_us of that peer over its own; above 1 is faster"),
            Column(f"ratio_to_best_{kind}_low", "ratio", "lower end of its 95% interval from paired rounds"),
            Column(f"ratio_to_best_{kind}_high", "ratio", "upper end of that interval"),
            Column(f"best_{kind}_by_kernels", "", f"the fastest {which}, by busy_time_us"),
            Column(f"ratio_to_best_{kind}_by_kernels", "ratio", "busy_time_us of that peer over its own"),
        )
    ),
    *(
        Column(f"{column_prefix(mode)}_time_us", "µs", f"device time {doc}", mode.replace("-", " "), _in_mode(mode))
        for mode, doc in _MODE_DOCS.items()
    ),
    Column(
        "modes_unavailable", "", "why a timing mode that the run asked for has no times", "",
        lambda v: v.modes_unavailable,
    ),
    Column(
        "command_buffer_launches", "launches",
        "launches that XLA by default, or -cudagraphs, replays from CUDA graphs; empty for other implementations",
        "", lambda v: v.command_buffer_launches,
    ),
    Column(
        "graph_inputs", "",
        "inputs that the CUDA graphs of -cudagraphs read in place (static) and those that each call copies into them "
        "(copied); d_y is the gradient of output y",
        "", lambda v: v.graph_inputs,
    ),
    Column(
        "launch_gap", "share", "share of device_time_us in which nothing ran", "launch gap", lambda v: v.launch_gap,
        _gap,
    ),
    Column(
        "throttled_rounds", "rounds", "rounds after which the GPU reported throttling; empty where it did not answer",
        "", lambda v: v.throttled_rounds,
    ),
    Column(
        "unsettled_rounds", "rounds", "rounds whose times still changed when the warm-up ended", "",
        lambda v: v.unsettled_rounds,
    ),
    Column(
        "processes", "processes", "fresh processes that took the rounds, one after the other", "",
        lambda v: v.processes,
    ),
    *(
        column
        for timer, timer_name in TIMER_NAMES.items()
        for column in (
            Column(
                f"{column_prefix(timer)}_vs_xla", "ratio",
                f"ratio of paired rounds by {timer_name}; below 1 is faster", "/ xla" if timer == MAIN else "",
            ),
            Column(
                f"{column_prefix(timer)}_vs_xla_word", "",
                f"faster, slower, tie or unresolved, by {timer_name} alone",
            ),
        )
    ),
    Column(
        "rate", "rate_unit", "compulsory bytes, or model FLOPs of a block whose work is products, over device_time_us",
        "rate", lambda v: v.rate, _rate,
    ),
    Column("rate_unit", "", "GB/s or TFLOP/s", "", lambda v: v.rate_unit),
    Column(
        "share_of_ceiling", "share",
        "rate over the ceiling measured in the segment: a stream of the same mix of reads and writes, or a product in "
        "the same dtype and precision",
        "of peak", lambda v: v.share_of_ceiling,
    ),
    Column(
        "compile_s", "s", "compile time", "compile s", lambda v: v.record.compile_s,
        lambda row: number(row["compile_s"], 2),
    ),
    Column(
        "max_error", "1",
        "error of the output or gradient furthest beyond its tolerance, or nearest to it; relative to the reference's "
        "root mean square",
        "error", _worst("error"), _error,
    ),
    Column("tolerance", "1", "tolerance of that error", "", _worst("tolerance")),
    Column(
        "bytes_compulsory", "bytes", "fewest bytes: every used input read once, every output written once",
        "compulsory MB", lambda v: v.bytes_compulsory,
    ),
    Column(
        "bytes_declared", "bytes",
        "bytes that the kernels declare to read and write in one call; empty where one kernel's are not known",
        "declared MB", lambda v: v.bytes_declared,
    ),
    Column(
        "fusion_efficiency", "share", "bytes_compulsory over bytes_declared", "efficiency",
        lambda v: ratio(v.bytes_compulsory, v.bytes_declared),
    ),
    Column(
        "dram_bytes", "bytes",
        "bytes over the memory bus by ncu, each kernel from an empty L2; without copies and memsets", "DRAM, alone MB",
        lambda v: v.traffic("alone", "dram_read", "dram_written"),
    ),
    Column(
        "dram_bytes_call", "bytes", "bytes over the memory bus by ncu, the whole call from a cold L2", "measured MB",
        lambda v: v.traffic("call", "dram_read", "dram_written"),
    ),
    Column(
        "l2_bytes", "bytes", "bytes through the L2 by ncu, each kernel from an empty L2", "L2 MB",
        lambda v: v.traffic("alone", "l2"),
    ),
    Column(
        "traffic_unavailable", "", "why ncu's counts are missing, where the run asked for them", "",
        lambda v: v.traffic_unavailable,
    ),
    Column(
        "intensity_flop_per_byte", "FLOP/byte", "model FLOPs over bytes_declared", "FLOP/B",
        lambda v: ratio(v.flops, v.bytes_declared),
    ),
    Column(
        "intensity_measured", "FLOP/byte", "model FLOPs over dram_bytes_call", "measured FLOP/B",
        lambda v: ratio(v.flops, v.traffic("call", "dram_read", "dram_written")),
    ),
    Column(
        "roofline_time_us", "µs",
        "sum over the kernels of max(bytes / bandwidth, FLOPs / product rate), at the segment's or target's ceilings",
        "roofline µs", lambda v: v.roofline_time_us,
    ),
    Column(
        "share_of_roofline", "share", "roofline_time_us over device_time_us", "of roofline",
        lambda v: ratio(v.roofline_time_us, v.device_time_us),
    ),
    Column(
        "gflop_per_s", "GFLOP/s", "model FLOPs over device_time_us", "GFLOP/s",
        lambda v: None if v.flops is None or not v.device_time_us else v.flops / v.device_time_us / 1e3,
    ),
    Column(
        "roofline_gflop_per_s", "GFLOP/s", "model FLOPs over roofline_time_us", "roofline GFLOP/s",
        lambda v: None if v.flops is None or not v.roofline_time_us else v.flops / v.roofline_time_us / 1e3,
    ),
    Column(
        "recoverable_us", "µs",
        "time of the kernels above their roofline times; zero for a kernel below its own, as one that read from L2",
        "recoverable µs", lambda v: v.recoverable_us,
    ),
    Column(
        "bound", "",
        "limit of the kernels that take most of the time: memory, compute, or launch, which includes gaps between "
        "kernels; empty where it is not known",
        "bound", lambda v: v.bound,
    ),
    Column(
        "peak_memory_bytes", "bytes",
        "measured peak above the inputs, the larger of forward's and backward's; empty for XLA, except in older runs",
        "memory MB", lambda v: v.peak_memory_bytes, memory,
    ),
    Column(
        "exposed_us", "µs",
        "of a case over several GPUs, on the slowest: device time minus that of the same program without exchanges",
        "exposed µs", lambda v: v.of_slowest_rank(exposed_us),
    ),
    Column(
        "communication_us", "µs", "on the slowest GPU: time in which a communication kernel ran", "communication µs",
        lambda v: v.of_slowest_rank(lambda rank: rank["communication"] * 1e6),
    ),
    Column(
        "overlap_us", "µs", "on the slowest GPU: time in which communication and other kernels ran together",
        "overlap µs", lambda v: v.of_slowest_rank(lambda rank: rank["overlap"] * 1e6),
    ),
    Column("peak_memory_reason", "", "why the measured peak is missing", "", lambda v: v.peak_memory_reason),
    Column(
        "peak_memory_planned_bytes", "bytes",
        "without a measured peak: the same, with the peak that XLA's compiler planned for each part without one", "",
        lambda v: v.peak_memory_planned_bytes,
    ),
    Column(
        "trace", "", "file of the timeline, loose or in timelines.zip", "",
        lambda v: (v.record.trace or {}).get("file"),
    ),
    Column(
        "provenance", "", "basis of the kernels' configurations, with counts where they differ", "provenance",
        lambda v: v.provenance, _provenance,
    ),
    Column(
        "products", "",
        "of hand-written implementations: which library or language computes the products of which stages", "",
        lambda v: v.products,
    ),
)
BY_NAME = {column.name: column for column in COLUMNS}
OF_ROOFLINE = tuple(
    BY_NAME[name]
    for name in ("roofline_time_us", "share_of_roofline", "roofline_gflop_per_s", "recoverable_us", "bound")
)

FINDING_COLUMNS = (
    Column("at_stake_us", "µs", "time that the finding is about", value=lambda finding: finding.at_stake_us),
    Column("finding", "", "the finding in words", value=lambda finding: finding.headline),
    Column("case", "", "its case", value=lambda finding: finding.case),
    Column(
        "kind", "", "kept on chip, saved, intermediates, above roofline, more FLOPs, recomputed, ...",
        value=lambda finding: finding.kind,
    ),
)


def row_of(values: Any, columns: Iterable[Column] = COLUMNS) -> Row:
    """Return the row of a record's values, or of those that the columns take.

    A column that needs the baseline's row, too, is None; `paired_rounds.add_comparisons` fills it.
    """
    return {column.name: None if column.value is None else column.value(values) for column in columns}
