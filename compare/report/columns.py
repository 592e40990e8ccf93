"""The columns of runs' tables: views, the page, JSON, CSV and docs/report-data.md are all made from them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ..base.text import number, printable
from ..graph.formats import about_us
from ..graph.model import PredictedTime
from ..plan.paired_rounds import BASELINE, TIMER_NAMES, Comparison, column_prefix
from ..plan.peers import PEERS
from ..plan.timing_modes import MAIN
from ..record.record_fields import RankFields
from ..sources.row import Row, ratio
from ..spec.dtype import DTYPES


@dataclass(frozen=True)
class Column:
    """One column.

    name: its key in JSON and CSV. unit: "" for text, "yes or no" for a bool. doc: its meaning, for readers.
    header: its heading in tables; bytes are shown in MB. value: a function of a Row, or of another table's lines; None:
    the attribute of that name. cell: makes its text in tables; None: by the unit.
    """

    name: str
    unit: str
    doc: str
    header: str = ""
    value: Callable[[Any], Any] | None = None
    cell: Callable[[Any], str] | None = None

    def of(self, row: Any) -> Any:
        """Return the value for a line of the table."""
        return getattr(row, self.name) if self.value is None else self.value(row)

    def text(self, row: Any) -> str:
        """Return the cell of a table."""
        if self.cell is not None:
            return self.cell(row)
        value = self.of(row)
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
    "^": ("unsettled_rounds", "in some round the times still changed when the warm-up ended."),
}


def marks(row: Row) -> str:
    """Return one character for each remark on the rounds of a time."""
    return "".join(mark for mark, (name, _) in _MARKS.items() if getattr(row, name))


def marks_explained(rows: Sequence[Row]) -> list[str]:
    """Return a line for each mark that some row has."""
    return [f"{mark}: {meaning}" for mark, (name, meaning) in _MARKS.items() if any(getattr(row, name) for row in rows)]


def mega(value: float | None) -> str:
    """Return millions, for bytes to be shown in MB."""
    return number(None if value is None else value / 1e6)


def percent(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"


def predicted_columns(of: Callable[[Any], PredictedTime | None], doc: str) -> tuple[Column, ...]:
    """Return the columns of a predicted time, with its interval, or with the reason why there is none."""

    def part(name: str) -> Callable[[Any], Any]:
        return lambda line: getattr(of(line), name, None) or None

    return (
        Column(
            "predicted_time_us", "µs", doc, "predicted µs", part("us"), lambda line: about_us(of(line), interval=True)
        ),
        Column("predicted_low_us", "µs", "lower end of its 80% interval", "", part("low_us")),
        Column("predicted_high_us", "µs", "upper end of its 80% interval", "", part("high_us")),
        Column("predicted_reason", "", "why there is no predicted time", "", part("reason")),
    )


def unmeasured_time(row: Row) -> str:
    """Return a compiled record's recorded time, else its predicted one with a ~, in µs; "" without both."""
    return number(row.recorded_time_us) or about_us(row.predicted)


def error_ratio(row: Row) -> float | None:
    """Return the error over its tolerance."""
    return ratio(row.max_error, row.tolerance)


def _time(row: Row) -> str:
    return " ".join(filter(None, [number(row.device_time_us), marks(row)]))


def _gap(row: Row) -> str:
    return percent(row.launch_gap) if (row.launch_gap or 0) >= 0.005 else ""


def _rate(row: Row) -> str:
    return "" if row.rate is None else f"{number(row.rate)} {row.rate_unit}"


def memory(row: Row) -> str:
    """Return the peak memory in MB, with a p where XLA's compiler planned it and nothing measured it."""
    planned = row.peak_memory_planned_bytes
    return mega(row.peak_memory_bytes) if planned is None else f"{mega(planned)} p"


def _error(row: Row) -> str:
    error, tolerance = row.max_error, row.tolerance
    if error is None:
        return ""
    if not math.isfinite(error):
        return str(error)
    return f"{error / tolerance:.2f}" if tolerance else f"{error:.1e} of 0"


def checked_on(row: Row) -> str:
    """Return the device of the check, with its dtype where that is not the case's own, and Triton's interpreter."""
    device, dtype = row.checked("device"), row.checked("dtype")
    if device is None:
        return ""
    remarks = ["interpreter"] if row.checked("backend") == "interpreter" else []
    if dtype not in (None, row.dtype):
        remarks.append(DTYPES[dtype].short if dtype in DTYPES else dtype)
    return printable(f"{device} ({', '.join(remarks)})" if remarks else device, 40)


def _provenance(row: Row) -> str:
    return "" if row.provenance in (None, "compiled") else printable(row.provenance, 40)


def _compared(value: Callable[[Comparison], Any]) -> Callable[[Row], Any]:
    return lambda row: None if row.comparison is None else value(row.comparison)


def _speedup(timer: str, about: str) -> Callable[[Row], Any]:
    return lambda row: getattr(row.speedups[timer], about) if timer in row.speedups else None


def _interval(kind: str, end: str) -> Callable[[Row], float | None]:
    return lambda row: None if (speedup := row.interval_to_best(kind)) is None else getattr(speedup, end)


def longest_alone(ranks: Sequence[RankFields]) -> float | None:
    """Return the time in seconds of the GPU with most work, without exchanges; None where it was not timed."""
    alone = [rank.alone_device_time for rank in ranks if rank.alone_device_time is not None]
    return max(alone, default=None)


def exposed_us(rank: RankFields, ranks: Sequence[RankFields]) -> float | None:
    """Return what communication costs a GPU beyond its wait for the GPU with most work."""
    longest = longest_alone(ranks)
    return None if longest is None else (rank.device_time - longest) * 1e6


IDENTITY = (
    Column("block", "", "the computation", "block"),
    Column("case", "", "the name of its sizes", "case", lambda row: row.case_name),
    Column("direction", "", "fwd: inference. train: forward and backward. joint: both in one program", "direction"),
    Column("dtype", "", "type of the inputs", "dtype"),
    Column("precision", "", "precision of float32 products"),
    Column("implementation", "", "whose code", "implementation"),
)
_MODE_DOCS = {
    "warm": "from a warm L2", "graph": "with all launches replayed from CUDA graphs",
    "no-graph": "with each kernel launched by itself, where the default replays graphs",
    "triton-launch": "with each Triton kernel launched by Triton's own launcher, where the default is direct",
}

COLUMNS = (
    *IDENTITY,
    Column("compiler", "", "xla, inductor, triton, ..."),
    Column(
        "status", "",
        "ok: executed and checked. compiled: for a GPU that was not there. wrong, failed, skipped, timeout: see detail",
        "status",
    ),
    Column("detail", "", "why the status is neither ok nor compiled", "detail"),
    Column(
        "checked_device", "", "device of the numerical check", "checked on", lambda row: row.checked("device"),
        checked_on,
    ),
    Column(
        "checked_backend", "", "backend of the check, as Triton's interpreter", "", lambda row: row.checked("backend"),
    ),
    Column("checked_dtype", "", "dtype of the check", "", lambda row: row.checked("dtype")),
    Column("checked_case", "", "case of the check", "", lambda row: row.checked("case")),
    Column("target", "", "GPU or TPU compiled for, where this machine has none"),
    Column(
        "segment", "",
        "stretch of the run with one environment and its own ceilings; times of two segments are never compared",
        "segment",
    ),
    Column("timer", "", "clock of the device times: cupti or cuda-events"),
    Column(
        "kernels", "launches", "kernels, copies and memsets of one call; as the compiler lists them where nothing ran",
        "kernels",
    ),
    Column(
        "kernel_source", "",
        "source of `kernels`: measured launches, or compiler, as where CUDA events took the times and saw no kernel",
    ),
    Column(
        "device_time_us", "µs",
        "device time of a call from a cold L2: median over all rounds, without the first call of each; of train, "
        "forward plus backward", "time µs", cell=_time,
    ),
    Column(
        "device_time_us_spread", "µs",
        "half the interquartile range of a call's device time over the same calls: noise within a round and "
        "drift between rounds; empty below four samples",
        "±", lambda row: row.spread_us, lambda row: number(row.spread_us, 2),
    ),
    Column(
        "recorded_time_us", "µs",
        "device time that the target's GPU took for the same kernels, of a run that is recorded in its target pack",
        "recorded µs",
    ),
    Column("recorded_time_reason", "", "why a compile for a target shows no recorded time"),
    *predicted_columns(
        lambda row: row.predicted,
        "device time of a call that was compiled and not measured: its kernels' predicted times, and the gaps between "
        "their launches",
    ),
    Column("forward_us", "µs", "median device time of forward", "forward", lambda row: row.phase_us("forward")),
    Column("backward_us", "µs", "median device time of backward", "backward", lambda row: row.phase_us("backward")),
    Column("busy_time_us", "µs", "median time in which some kernel ran; empty where CUDA events took the times"),
    Column("wall_time_us", "µs", "host time of a call without the timer, median over rounds", "wall µs"),
    Column(
        "time_vs_xla", "ratio",
        f"device_time_us over that of {BASELINE} on the same case, in the same segment, by the same timer; empty where "
        "the workers' clocks disagree",
    ),
    Column(
        "verdict_vs_xla", "", f"comparison with {BASELINE} from paired rounds, in words, with its 95% interval",
        "compared with xla", _compared(lambda comparison: comparison.text),
        lambda row: row.comparison.text if row.comparison else "",
    ),
    Column(
        "verdict_vs_xla_low", "ratio",
        "lower end of the 95% interval of the time over xla's, from paired rounds; below 1 is faster. Where "
        "`verdict_vs_xla` says faster, its words give the inverse", "",
        _compared(lambda comparison: comparison.main.low),
    ),
    Column(
        "verdict_vs_xla_high", "ratio", "upper end of that interval", "",
        _compared(lambda comparison: comparison.main.high),
    ),
    Column(
        "verdict_vs_xla_word", "",
        "faster, slower, tie, unresolved, or depends on the timer: two timers name opposite winners",
        "compared with xla", _compared(lambda comparison: comparison.word),
    ),
    *(
        column
        for kind, which in PEERS.items()
        for column in (
            Column(
                f"best_{kind}", "", f"for the project's own kernels: the fastest {which}, by device time", "",
                partial(Row.best_peer, kind=kind),
            ),
            Column(
                f"ratio_to_best_{kind}", "ratio", "device_time_us of that peer over its own; above 1 is faster", "",
                partial(Row.ratio_to_best, kind=kind),
            ),
            Column(
                f"ratio_to_best_{kind}_low", "ratio", "lower end of its 95% interval from paired rounds", "",
                _interval(kind, "low"),
            ),
            Column(f"ratio_to_best_{kind}_high", "ratio", "upper end of that interval", "", _interval(kind, "high")),
            Column(
                f"best_{kind}_by_kernels", "", f"the fastest {which}, by busy_time_us", "",
                partial(Row.best_peer, kind=kind, suffix="_by_kernels"),
            ),
            Column(
                f"ratio_to_best_{kind}_by_kernels", "ratio", "busy_time_us of that peer over its own", "",
                partial(Row.ratio_to_best, kind=kind, suffix="_by_kernels"),
            ),
        )
    ),
    *(
        Column(
            f"{column_prefix(mode)}_time_us", "µs", f"device time {doc}", mode.replace("-", " "),
            partial(Row.time_us_in, mode=mode),
        )
        for mode, doc in _MODE_DOCS.items()
    ),
    Column("modes_unavailable", "", "why a timing mode that the run asked for has no times"),
    Column(
        "command_buffer_launches", "launches",
        "launches that XLA by default, or -cudagraphs, replays from CUDA graphs; empty for other implementations",
    ),
    Column(
        "graph_inputs", "",
        "inputs that the CUDA graphs of -cudagraphs read in place (static) and those that each call copies into them "
        "(copied); d_y is the gradient of output y",
    ),
    Column("launch_gap", "share", "share of device_time_us in which nothing ran", "launch gap", cell=_gap),
    Column(
        "throttled_rounds", "rounds", "rounds after which the GPU reported throttling; empty where it did not answer",
    ),
    Column("unsettled_rounds", "rounds", "rounds whose times still changed when the warm-up ended"),
    Column("processes", "processes", "fresh processes that took the rounds, one after the other"),
    *(
        column
        for timer, timer_name in TIMER_NAMES.items()
        for column in (
            Column(
                f"{column_prefix(timer)}_vs_xla", "ratio", f"ratio of paired rounds by {timer_name}; below 1 is faster",
                "/ xla" if timer == MAIN else "", _speedup(timer, "ratio"),
            ),
            Column(
                f"{column_prefix(timer)}_vs_xla_word", "",
                f"faster, slower, tie or unresolved, by {timer_name} alone", "", _speedup(timer, "word"),
            ),
        )
    ),
    Column(
        "rate", "rate_unit", "compulsory bytes, or model FLOPs of a block whose work is products, over device_time_us",
        "rate", cell=_rate,
    ),
    Column("rate_unit", "", "GB/s or TFLOP/s"),
    Column(
        "share_of_ceiling", "share",
        "rate over the ceiling measured in the segment: a stream of the same mix of reads and writes, or a product in "
        "the same dtype and precision", "of peak",
    ),
    Column("compile_s", "s", "compile time", "compile s", cell=lambda row: number(row.compile_s, 2)),
    Column(
        "max_error", "1",
        "error of the output or gradient furthest beyond its tolerance, or nearest to it; relative to the reference's "
        "root mean square", "error", cell=_error,
    ),
    Column("tolerance", "1", "tolerance of that error"),
    Column(
        "bytes_compulsory", "bytes", "fewest bytes: every used input read once, every output written once",
        "compulsory MB",
    ),
    Column(
        "bytes_declared", "bytes",
        "bytes that the kernels declare to read and write in one call; empty where one kernel's are not known",
        "declared MB",
    ),
    Column("fusion_efficiency", "share", "bytes_compulsory over bytes_declared", "efficiency"),
    Column(
        "dram_bytes", "bytes",
        "bytes over the memory bus by ncu, each kernel from an empty L2; without copies and memsets", "DRAM, alone MB",
    ),
    Column(
        "dram_bytes_call", "bytes", "bytes over the memory bus by ncu, the whole call from a cold L2", "measured MB",
    ),
    Column(
        "l2_bytes", "bytes", "bytes through the L2 by ncu, each kernel from an empty L2", "L2 MB",
        lambda row: row.traffic("alone", "l2"),
    ),
    Column("traffic_unavailable", "", "why ncu's counts are missing, where the run asked for them"),
    Column("intensity_flop_per_byte", "FLOP/byte", "model FLOPs over bytes_declared", "FLOP/B"),
    Column("intensity_measured", "FLOP/byte", "model FLOPs over dram_bytes_call", "measured FLOP/B"),
    Column(
        "roofline_time_us", "µs",
        "sum over the kernels of max(bytes / bandwidth, FLOPs / product rate), at the segment's or target's ceilings",
        "roofline µs",
    ),
    Column("share_of_roofline", "share", "roofline_time_us over device_time_us", "of roofline"),
    Column("gflop_per_s", "GFLOP/s", "model FLOPs over device_time_us", "GFLOP/s"),
    Column("roofline_gflop_per_s", "GFLOP/s", "model FLOPs over roofline_time_us", "roofline GFLOP/s"),
    Column(
        "recoverable_us", "µs",
        "time of the kernels above their roofline times; zero for a kernel below its own, as one that read from L2",
        "recoverable µs",
    ),
    Column(
        "bound", "",
        "limit of the kernels that take most of the time: memory, compute, or launch, which includes gaps between "
        "kernels; empty where it is not known", "bound",
    ),
    Column(
        "peak_memory_bytes", "bytes",
        "measured peak above the inputs, the larger of forward's and backward's; empty for XLA",
        "memory MB", cell=memory,
    ),
    Column(
        "exposed_us", "µs",
        "of a case over several GPUs, on the slowest: device time minus the longest of the same program without "
        "exchanges",
        "exposed µs", lambda row: row.of_slowest_rank(exposed_us),
    ),
    Column(
        "communication_us", "µs", "on the slowest GPU: time in which a communication kernel ran", "communication µs",
        lambda row: row.of_slowest_rank(lambda rank, _: rank.communication * 1e6),
    ),
    Column(
        "overlap_us", "µs", "on the slowest GPU: time in which communication and other kernels ran together",
        "overlap µs", lambda row: row.of_slowest_rank(lambda rank, _: rank.overlap * 1e6),
    ),
    Column("peak_memory_reason", "", "why the measured peak is missing"),
    Column(
        "peak_memory_planned_bytes", "bytes",
        "without a measured peak: the same, with the peak that XLA's compiler planned for each phase without one",
    ),
    Column("trace", "", "file of the timeline, loose or in timelines.zip"),
    Column(
        "provenance", "", "basis of the kernels' configurations, with counts where they differ", "provenance",
        cell=_provenance,
    ),
    Column(
        "products", "",
        "of hand-written implementations: which library or language computes the products of which stages",
    ),
)
BY_NAME = {column.name: column for column in COLUMNS}

FINDING_COLUMNS = (
    Column("at_stake_us", "µs", "time that the finding is about"),
    Column("finding", "", "the finding in words", value=lambda finding: finding.headline),
    Column("case", "", "its case"),
    Column("kind", "", "kept on chip, saved, intermediates, above roofline, more FLOPs, recomputed, ..."),
    Column("predicted", "yes or no", "whether at_stake_us is made of predicted times"),
)


def of_row(column: Column) -> Column:
    """Return a column of Row for the lines of another table, which have their row as `row`."""
    cell = column.cell
    return replace(
        column, value=lambda line: column.of(line.row), cell=None if cell is None else lambda line: cell(line.row)
    )


def as_data(rows: Iterable[Any], columns: Iterable[Column] = COLUMNS) -> list[dict[str, Any]]:
    """Return the values of a table's lines by column, for JSON and CSV."""
    columns = list(columns)
    return [{column.name: column.of(row) for column in columns} for row in rows]
