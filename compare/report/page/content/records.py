"""The table of all records: columns, and rows of plain values that the page sorts, searches and filters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ....base.text import printable
from ....spec.dtype import DTYPES
from ...table import marks
from .overview import href
from .reading import Member, Run


@dataclass(frozen=True)
class Column:
    """kind: "text", "filter" (text of few values, to choose from), "counted" (words with how often each is there, to
    choose a word from), "number", "count", "percent", or "case" (a link to its page). help: what it is, with its unit.
    """

    title: str
    kind: str
    help: str


COLUMNS = (
    Column("block", "filter", "what is computed"),
    Column("case", "case", "its sizes; a link to its page"),
    Column("implementation", "filter", "whose code"),
    Column("dtype", "filter", "and the precision of float32 products"),
    Column("direction", "filter", "fwd: inference. train: forward and backward. joint: both in one program"),
    Column("status", "filter", "ok: executed and checked. compiled: for a GPU that was not there"),
    Column("time µs", "number", "device time of a call from a cold L2, median of all samples"),
    Column("±", "number", "half the interquartile range of the samples, µs"),
    Column("/ best", "number", "over the smallest time of its case, segment and timer"),
    Column("against xla", "filter", "verdict from paired rounds, by cold device time"),
    Column("/ xla", "number", "ratio of paired rounds; below 1 is faster"),
    Column("marks", "text", "! throttled in some round, ~ times still changing after the warm-up, p memory is planned"),
    Column("gaps", "percent", "share of the time in which nothing ran"),
    Column("wall µs", "number", "host time a call"),
    Column("least µs", "number", "what its kernels take at least, one by one, at the measured ceilings"),
    Column("recoverable µs", "number", "what its kernels took above that"),
    Column("bound", "filter", "what bounds the kernels that take most of the time"),
    Column("kernels", "count", "kernels, copies and memsets of a call; what the compiler listed where nothing ran"),
    Column("least MB", "number", "every used input read once, every output written once"),
    Column("moved MB", "number", "what its kernels declare that they read and write"),
    Column("counted MB", "number", "what crossed the memory bus in a call, by ncu"),
    Column("efficiency", "percent", "least MB over moved MB"),
    Column("memory MB", "number", "peak above the inputs; marked p, XLA's compiler planned it and nothing measured it"),
    Column("error", "number", "largest error over its tolerance; above 1 is wrong"),
    Column("compile s", "number", "seconds to compile"),
    Column("provenance", "counted", "what its kernels' configuration rests on, counted where they differ"),
    Column("detail", "text", "why it is not ok"),
)


def data(run: Run) -> dict[str, Any]:
    """For static/records.js: {"columns", "rows", "links": of each row the page of its case}."""
    lines = [(case, member) for case in run.cases for member in case.members]
    return {
        "columns": [{"title": c.title, "kind": c.kind, "help": c.help} for c in COLUMNS],
        "rows": [_values(member, case.best(member)) for case, member in lines],
        "links": [href(case) for case, _ in lines],
    }


def _values(member: Member, best: Member | None) -> list[Any]:
    row = member.row
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
