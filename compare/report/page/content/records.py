"""The table of all records: columns, and rows of values that the page sorts, searches and filters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ....base.text import printable
from ....sources.result import Result
from ....sources.row import ratio
from ....sources.source import Source
from ....spec.dtype import DTYPES
from ...columns import BY_NAME, Column, error_ratio, marks
from .overview import href

Value = Callable[[Result, Result | None], Any]  # of a record, and of the fastest one of its case


def data(source: Source) -> dict[str, Any]:
    """Return {"columns", "rows", "links": the page of each row's case} for static/records.js."""
    lines = [(case, result) for case in source.cases for result in case.results]
    predicted = any(result.row.predicted_time_us is not None for _, result in lines)
    hidden = {"recorded_time_us": not source.recorded_on, "predicted_time_us": not predicted}
    shown = [one for one in _COLUMNS if not hidden.get(one[0].name)]
    return {
        "columns": [{"title": column.header, "kind": kind, "help": column.doc} for column, kind, _ in shown],
        "rows": [[value(result, case.best(result)) for _, _, value in shown] for case, result in lines],
        "links": [href(case.id) for case, _ in lines],
    }


def _of_row(name: str, kind: str = "", length: int = 100) -> tuple[Column, str, Value]:
    """A column of compare.report.columns; text is cut at `length`.

    kind: "text", "filter" (text of few values, to choose from), "counted" (words with their counts, to choose a word
    from), "number", "count", "percent", or "case" (a link to its page); "" for a number, of a kind that the unit tells.
    """
    column = BY_NAME[name]

    def value(result: Result, best: Result | None) -> Any:
        cell = column.of(result.row)
        if column.unit == "bytes":
            return None if cell is None else cell / 1e6
        return cell if column.unit else printable(cell or "", length)

    return column, kind or {"share": "percent", "launches": "count"}.get(column.unit, "number"), value


def _dtype(result: Result, best: Result | None) -> str:
    precision = "" if result.row.precision == "ieee" else f" {result.row.precision}"
    return f"{DTYPES[result.row.dtype].short}{precision}"


def _marks(result: Result, best: Result | None) -> str:
    return marks(result.row) + ("" if result.row.peak_memory_planned_bytes is None else "p")


def _memory(result: Result, best: Result | None) -> float | None:
    planned, measured = result.row.peak_memory_planned_bytes, result.row.peak_memory_bytes
    return ratio(measured if planned is None else planned, 1e6)


_COLUMNS: tuple[tuple[Column, str, Value], ...] = (
    _of_row("block", "filter"),
    _of_row("case", "case"),
    _of_row("implementation", "filter"),
    (Column("dtype", "", "type of the inputs, and the precision of float32 products", "dtype"), "filter", _dtype),
    _of_row("direction", "filter"),
    _of_row("status", "filter"),
    _of_row("device_time_us"),
    _of_row("device_time_us_spread"),
    _of_row("recorded_time_us"),
    _of_row("predicted_time_us"),
    (
        Column("time_vs_best", "ratio", "device time over the shortest one of its case, segment and timer", "/ best"),
        "number", lambda result, best: None if best is None else ratio(result.time_us, best.time_us),
    ),
    _of_row("verdict_vs_xla_word", "filter"),
    _of_row("cold_vs_xla"),
    (
        Column(
            "marks", "", "! throttled in some round, ^ times still changed when the warm-up ended, p memory is planned",
            "marks",
        ),
        "text", _marks,
    ),
    _of_row("launch_gap"),
    _of_row("wall_time_us"),
    _of_row("roofline_time_us"),
    _of_row("recoverable_us"),
    _of_row("bound", "filter"),
    _of_row("kernels"),
    _of_row("bytes_compulsory"),
    _of_row("bytes_declared"),
    _of_row("dram_bytes_call"),
    _of_row("fusion_efficiency"),
    (
        Column("memory", "bytes", "peak above the inputs; p: XLA's compiler planned it, not measured", "memory MB"),
        "number", _memory,
    ),
    (
        Column("error", "1", "largest error over its tolerance; above 1 is wrong", "error"),
        "number", lambda result, best: error_ratio(result.row),
    ),
    _of_row("compile_s"),
    _of_row("provenance", "counted", 60),
    _of_row("detail", "text", 400),
)
