"""The tables of a case that show report columns: times, bytes, rates and ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from ....base.text import number
from ....sources.row import Row
from ... import ranks
from ...columns import BY_NAME, Column
from ...table import NAMES


class Table(NamedTuple):
    """Columns and rows of texts; the first text of a row is its name."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[str]]


def table(lines: Iterable[Any], columns: Iterable[Column]) -> Table | None:
    """Return a row a line, without columns that are blank in all of them; None without lines."""
    lines = list(lines)
    cells = {column: texts for column in columns if any(texts := [column.text(line) for line in lines])}
    return Table(list(cells), list(zip(*cells.values(), strict=True))) if lines else None


def unknown_roofline(row: Row) -> bool:
    """Return whether kernels have a roofline time that cannot be known."""
    return row.roofline_time_us is None and bool((graph := row.read_graph()) and graph.kernels)


def unknown_recoverable(row: Row) -> bool:
    return row.recoverable_us is None and row.device_time_us is not None


def _named(*names: str, **cells: Callable[[Row], str] | None) -> list[Column]:
    """Return columns by name. cells: instead of the column's own; None for three digits, and shares however small."""
    return [replace(BY_NAME[name], cell=cells.get(name, BY_NAME[name].cell)) for name in names]


BYTES = _named("implementation", "bytes_declared", "fusion_efficiency", "dram_bytes_call", "dram_bytes", "l2_bytes")
RATES = _named(
    "implementation", "intensity_flop_per_byte", "intensity_measured", "gflop_per_s", "roofline_gflop_per_s",
    "share_of_roofline", "bound", "rate", "share_of_ceiling",
)
# Columns of the terminal's table of times that the page shows elsewhere.
_ELSEWHERE = {column.name for column in (*BYTES, *RATES, *ranks.SHOWN)} - {"implementation", "device_time_us"} | {
    "status", "checked_device", "kernels", "recorded_time_us", "predicted_time_us", "bytes_compulsory", "max_error",
    "provenance", "segment",
}
TIMES = _named(
    *(name for name in NAMES if name not in _ELSEWHERE), "recoverable_us", "roofline_time_us", "share_of_roofline",
    "bound",
    device_time_us_spread=None, launch_gap=None, compile_s=None,
    roofline_time_us=lambda row: "?" if unknown_roofline(row) else number(row.roofline_time_us),
    recoverable_us=lambda row: "?" if unknown_recoverable(row) else number(row.recoverable_us),
)
TIMES_OF_FORWARD = [column for column in TIMES if column.name != "forward_us"]
