"""Bytes that a block must move, that its kernels declare, and that the GPU counted, side by side."""

from __future__ import annotations

from ..base.text import number, printable
from .rows import Row
from .table import Columns, grouped, mega, noted, percent

LEGEND = (
    "least: every used input read once, every output written once. declared: what the compiled kernels read and write.",
    "DRAM, alone: counted by ncu, each kernel from an empty L2. DRAM, call: the whole call from a cold L2. What is",
    "written last may still lie in L2, so that writes can be short by one L2. L2: all that passed it, also within it.",
    "call / least: how often the least bytes crossed the memory bus. Copies and memsets are in none of the counts.",
)
_COLUMNS: Columns = {
    "implementation": lambda r: printable(str(r["implementation"]), 40),
    "kernels": lambda r: number(r["kernels"]),
    "least MB": lambda r: mega(r["bytes_compulsory"]),
    "declared MB": lambda r: mega(r["bytes_moved"]),
    "DRAM, alone MB": lambda r: mega(r["dram_bytes"]),
    "DRAM, call MB": lambda r: mega(r["dram_bytes_call"]),
    "L2 MB": lambda r: mega(r["l2_bytes"]),
    "call / declared": lambda r: percent(_ratio(r["dram_bytes_call"], r["bytes_moved"])),
    "call / least": lambda r: percent(_ratio(r["dram_bytes_call"], r["bytes_compulsory"])),
}


def render(rows: list[Row], *, markdown: bool = False) -> str:
    return grouped(rows, lambda rows: _COLUMNS, LEGEND, markdown=markdown, notes=_notes)


def _ratio(one: int | None, other: int | None) -> float | None:
    return None if one is None or not other else one / other


def _notes(rows: list[Row], markdown: bool) -> list[str]:
    """Why an implementation has none."""
    return noted(((row, row["traffic_unavailable"]) for row in rows), markdown)
