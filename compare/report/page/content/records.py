"""The table of all records: columns, and rows of values that the page sorts, searches and filters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ....base.text import printable
from ....spec.dtype import DTYPES
from ...table import marks
from .overview import href
from .run_data import Result, Run


@dataclass(frozen=True)
class Column:
    """A column of the table. help: its meaning and unit.

    kind: "text"; "filter" (text with few values, with a filter); "counted" (words with their counts, with a filter by
    word); "number"; "count"; "percent"; or "case" (a link to the case's page).
    """

    title: str
    kind: str
    help: str


COLUMNS = (
    Column("block", "filter", "the computation"),
    Column("case", "case", "the name of the sizes, linked to the case's page"),
    Column("implementation", "filter", "the compiler, library or kernels"),
    Column("dtype", "filter", "the dtype, and the precision of float32 matrix products"),
    Column("direction", "filter", "fwd: inference. train: forward and backward. joint: both in one program"),
    Column("status", "filter", "ok: executed and checked. compiled: for a GPU, without running on it"),
    Column("time µs", "number", "device time of a call with cold L2, median of all samples"),
    Column("±", "number", "half the interquartile range of the samples, µs"),
    Column("/ best", "number", "time divided by the fastest of the same case, segment and timer"),
    Column("compared with xla", "filter", "faster, slower, tie or unresolved: paired rounds, cold device time"),
    Column("/ xla", "number", "ratio of paired rounds; below 1 is faster"),
    Column("marks", "text", "!: throttled in some round. ~: times still changing after the warm-up. p: planned memory"),
    Column("launch gap", "percent", "share of the time in which no kernel ran"),
    Column("wall µs", "number", "host time per call"),
    Column("roofline µs", "number", "sum of the kernels' roofline times at the measured ceilings"),
    Column("recoverable µs", "number", "measured time minus roofline time, summed over kernels"),
    Column("bound", "filter", "the limit of the kernels that take most of the time: memory or compute"),
    Column("kernels", "count", "kernels, copies and memsets of a call; if nothing ran, those that the compiler lists"),
    Column("compulsory MB", "number", "each used input once, each output once"),
    Column("declared MB", "number", "bytes that the kernels declare to read and write"),
    Column("measured MB", "number", "DRAM traffic of a call, by ncu"),
    Column("efficiency", "percent", "compulsory MB divided by declared MB"),
    Column("memory MB", "number", "peak above the inputs. Mark p: planned by XLA's compiler, not measured"),
    Column("error", "number", "largest error divided by its tolerance; above 1 is wrong"),
    Column("compile s", "number", "seconds to compile"),
    Column("provenance", "counted", "where the kernels' configurations come from, with counts if they differ"),
    Column("detail", "text", "why the status is not ok"),
)


def data(run: Run) -> dict[str, Any]:
    """Return the data for static/records.js: {"columns", "rows", "links": the page of each row's case}."""
    lines = [(case, result) for case in run.cases for result in case.results]
    return {
        "columns": [{"title": c.title, "kind": c.kind, "help": c.help} for c in COLUMNS],
        "rows": [_values(result, case.best(result)) for case, result in lines],
        "links": [href(case) for case, _ in lines],
    }


def _values(result: Result, best: Result | None) -> list[Any]:
    row = result.row
    precision = "" if row["precision"] == "ieee" else f" {row['precision']}"
    time = row["device_time_us"]
    return [
        printable(row["block"], 100), printable(row["case"], 100), printable(row["implementation"], 100),
        f"{DTYPES[row['dtype']].short}{precision}", row["direction"], row["status"], time, row["device_time_us_spread"],
        time / best.time_us if time and best is not None and best.time_us else None, row["verdict_vs_xla_word"],
        row["cold_vs_xla"], _marks(row), row["launch_gap"], row["wall_time_us"], row["floor_us"], row["recoverable_us"],
        row["bound"], row["kernels"], _mega(row["bytes_compulsory"]), _mega(row["bytes_moved"]),
        _mega(row["dram_bytes_call"]), row["fusion_efficiency"], _mega(_peak(row)), _error(row),
        row["compile_s"], printable(row["provenance"] or "", 60), printable(row["detail"] or "", 400),
    ]


def _peak(row: dict[str, Any]) -> int | None:
    planned: int | None = row["peak_memory_planned_bytes"]
    measured: int | None = row["peak_memory_bytes"]
    return measured if planned is None else planned


def _marks(row: dict[str, Any]) -> str:
    return marks(row) + ("" if row["peak_memory_planned_bytes"] is None else "p")


def _mega(count: float | None) -> float | None:
    return None if count is None else count / 1e6


def _error(row: dict[str, Any]) -> float | None:
    if row["max_error"] is None or not row["tolerance"]:
        return None
    return float(row["max_error"] / row["tolerance"])
