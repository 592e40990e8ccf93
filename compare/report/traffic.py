"""Compulsory, declared and measured bytes of each implementation, next to each other, and why there is no count."""

from __future__ import annotations

from functools import partial

from ..sources.row import ratio
from .columns import BY_NAME, Column
from .table import grouped

LEGEND = (
    "compulsory: every used input read once, every output written once. declared: what the kernels read and write.",
    "DRAM, alone: ncu's count, each kernel from an empty L2. measured: ncu's count of the whole call from a cold L2.",
    "The last writes may still be in L2, so that a count can be short by the size of L2. L2: all bytes through it.",
    "measured / compulsory: how often the compulsory bytes crossed the memory bus. No count has copies and memsets.",
)
_NAMES = (
    "implementation", "kernels", "bytes_compulsory", "bytes_declared", "dram_bytes", "dram_bytes_call", "l2_bytes",
)
_COLUMNS = (
    *(BY_NAME[name] for name in _NAMES),
    Column(
        "call_vs_declared", "share", "dram_bytes_call over bytes_declared", "measured / declared",
        lambda row: ratio(row.dram_bytes_call, row.bytes_declared),
    ),
    Column(
        "call_vs_compulsory", "share", "dram_bytes_call over bytes_compulsory", "measured / compulsory",
        lambda row: ratio(row.dram_bytes_call, row.bytes_compulsory),
    ),
)
render = partial(grouped, columns=_COLUMNS, legend=LEGEND, notes=lambda row: [row.traffic_unavailable])
