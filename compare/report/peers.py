"""The project's own kernels against the best peer of each realistic case, summed up over a run."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence

from ..plan.peers import PEERS, TIMES, is_own
from ..spec.blocks import BLOCKS
from .columns import IDENTITY, Column, Row
from .rows import id_of
from .table import explained, table

FASTEST = "fastest of them"
NAMES = {"": "device time", "_by_kernels": "kernels alone"}
LEGEND = (
    "A ratio is the best peer's time over its own: above 1 is faster than every peer. Edge cases do not count.",
    "peers: all are the implementations that this project did not write; stock ones come with JAX or PyTorch.",
    "own: whose time is compared; the fastest of them is chosen case by case. dtype: of the cases; fp8 products count",
    "as bfloat16.",
)
COLUMNS = (
    Column("peers", "", "all: every peer. stock: those that come with JAX or PyTorch", "peers"),
    Column("time", "", "device time, or kernels alone (busy time)", "time"),
    Column("own", "", "the implementation, or the fastest of them in each case", "own"),
    Column("dtype", "", "dtype of the cases, or all", "dtype"),
    Column("cases", "cases", "realistic cases with both times", "cases"),
    Column("geometric_mean", "ratio", "geometric mean of the best peer's time over its own", "geomean"),
    Column("slower", "cases", "cases in which the ratio is below 1", "below 1"),
    Column("worst", "ratio", "smallest ratio", "worst"),
    Column("worst_case", "", "its case", "worst case", cell=lambda row: row["worst_case"]),
    Column("worst_peer", "", "its best peer", "best peer there"),
)


def of(rows: Iterable[Row]) -> list[Row]:
    """Return rows with `COLUMNS`: for each kind of peers and time, the fastest own rows, then these by dtype, then each
    own implementation by itself."""
    own = [row for row in rows if is_own(row) and is_realistic(row)]
    names = dict.fromkeys(row["implementation"] for row in own)
    dtypes = dict.fromkeys(row["dtype"] for row in own)
    chosen = {(FASTEST, "all"): own}
    chosen |= {(FASTEST, dtype): [row for row in own if row["dtype"] == dtype] for dtype in dtypes}
    chosen |= {(name, "all"): [row for row in own if row["implementation"] == name] for name in names}
    found = []
    for kind, suffix, (name, dtype) in itertools.product(PEERS, TIMES, chosen):
        if compared := _fastest(chosen[name, dtype], f"ratio_to_best_{kind}{suffix}"):
            found.append(_summary(compared, kind, suffix) | {"own": name, "dtype": dtype})
    return [{column.name: row[column.name] for column in COLUMNS} for row in found]


def is_realistic(row: Mapping[str, str]) -> bool:
    """Return whether the row's case is one of its block's, and no edge case."""
    block = BLOCKS.get(row["block"])
    return block is not None and any(shape.name == row["case"] and not shape.edge for shape in block.shapes)


def render(found: list[Row], *, markdown: bool = False) -> str:
    if not found:
        return "no realistic case has times of the project's own kernels and of a peer"
    return "\n\n".join([table(found, COLUMNS, markdown), *explained(LEGEND, markdown)])


def _fastest(rows: Iterable[Row], ratio: str) -> list[Row]:
    """Return each case's row with the largest ratio; a case of two segments counts in each."""
    best: dict[tuple[object, ...], Row] = {}
    for row in rows:
        if row[ratio]:
            key = (*(row[column.name] for column in IDENTITY if column.name != "implementation"), row["segment"])
            best[key] = max(best.get(key, row), row, key=lambda each: each[ratio])
    return list(best.values())


def _summary(rows: Sequence[Row], kind: str, suffix: str) -> Row:
    ratio = f"ratio_to_best_{kind}{suffix}"
    worst = min(rows, key=lambda row: row[ratio])
    return {
        "peers": "stock" if kind == "stock_peer" else "all", "time": NAMES[suffix],
        "cases": len(rows), "geometric_mean": math.exp(math.fsum(math.log(row[ratio]) for row in rows) / len(rows)),
        "slower": sum(row[ratio] < 1 for row in rows), "worst": worst[ratio],
        "worst_case": id_of(worst).rpartition("/")[0],
        "worst_peer": worst[f"best_{kind}{suffix}"],
    }
