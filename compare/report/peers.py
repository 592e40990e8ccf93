"""The project's own kernels against the best peer of each realistic case, summed up over a run."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..plan.peers import PEERS, TIMES, is_own
from ..sources.row import Row
from ..spec.blocks import BLOCKS
from .columns import Column
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
    Column("worst_case", "", "its case", "worst case", cell=lambda line: line.worst_case),
    Column("worst_peer", "", "its best peer", "best peer there"),
)


@dataclass(frozen=True)
class Standing:
    """Some implementations of this project against the best peers; the attributes are those of COLUMNS."""

    peers: str
    time: str
    own: str
    dtype: str
    cases: int
    geometric_mean: float
    slower: int
    worst: float
    worst_case: str
    worst_peer: str | None


def of(rows: Iterable[Row]) -> list[Standing]:
    """Return for each kind of peers and time: the fastest own rows, then these by dtype, then each own implementation
    by itself."""
    own = [row for row in rows if is_own(row.block, row.implementation) and is_realistic(row.block, row.case_name)]
    names = dict.fromkeys(row.implementation for row in own)
    dtypes = dict.fromkeys(str(row.dtype) for row in own)
    chosen = {(FASTEST, "all"): own}
    chosen |= {(FASTEST, dtype): [row for row in own if row.dtype == dtype] for dtype in dtypes}
    chosen |= {(name, "all"): [row for row in own if row.implementation == name] for name in names}
    return [
        _standing(compared, kind, suffix, name, dtype)
        for kind, suffix, (name, dtype) in itertools.product(PEERS, TIMES, chosen)
        if (compared := _fastest(chosen[name, dtype], kind, suffix))
    ]


def is_realistic(block_name: str, case_name: str | None) -> bool:
    """Return whether the case is one of its block's, and no edge case."""
    block = BLOCKS.get(block_name)
    return block is not None and any(shape.name == case_name and not shape.edge for shape in block.shapes)


def render(standings: Sequence[Standing], *, markdown: bool = False) -> str:
    if not standings:
        return "no realistic case has times of the project's own kernels and of a peer"
    return "\n\n".join([table(standings, COLUMNS, markdown), *explained(LEGEND, markdown)])


Compared = tuple[float, Row]  # the best peer's time over the row's


def _fastest(rows: Iterable[Row], kind: str, suffix: str) -> list[Compared]:
    """Return each case's row with the largest ratio; a case of two segments counts in each."""
    best: dict[tuple[object, ...], Compared] = {}
    for row in rows:
        if ratio := row.ratio_to_best(kind, suffix):
            key = row.block, row.case_name, row.direction, row.dtype, row.precision, row.segment
            best[key] = max(best.get(key, (ratio, row)), (ratio, row), key=lambda compared: compared[0])
    return list(best.values())


def _standing(compared: Sequence[Compared], kind: str, suffix: str, own: str, dtype: str) -> Standing:
    ratios = [ratio for ratio, _ in compared]
    worst, row = min(compared, key=lambda compared: compared[0])
    return Standing(
        peers="stock" if kind == "stock_peer" else "all", time=NAMES[suffix], own=own, dtype=dtype, cases=len(ratios),
        geometric_mean=math.exp(math.fsum(map(math.log, ratios)) / len(ratios)), slower=sum(r < 1 for r in ratios),
        worst=worst, worst_case=row.id.rpartition("/")[0], worst_peer=row.best_peer(kind, suffix),
    )
