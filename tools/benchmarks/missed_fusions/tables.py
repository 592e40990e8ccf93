"""The tables of docs/fusion-graph.md and docs/predicted-times.md, from a file that `--json` wrote on a GPU."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from xlafuse.compare.base.text import number
from xlafuse.compare.graph import store
from xlafuse.compare.graph.analyse.missed_fusions import missed, together
from xlafuse.compare.graph.model import FusionGraph
from xlafuse.compare.predict.times import with_predictions
from xlafuse.compare.sources.target_ceilings import own_ceilings

from .outcome import summary_of

CASES = ["case", "kernels", "price", "realised", "realised / price"]
SIZES = ["cases", "price: median", "10% to 90%", "by bytes and launches: median", "10% to 90%"]
PRICE, UNPREDICTED, BYTES = "predicted times", "bytes and launches", "sum of `bytes_saved` / bandwidth"
METHODS = ["saving from", "cases", "median of realised / expected", "10% to 90%", "median error"]


@dataclass(frozen=True)
class Forced:
    """A forced fusion. realised_us: None where the pair does not count."""

    name: str
    size: str
    kernels: tuple[int, int]
    realised_us: float | None
    unfused: FusionGraph

    @cached_property
    def expected_us(self) -> Mapping[str, float | None]:
        """The saving by its price, by the price of a GPU without predictions, and by the reasons' bytes alone."""
        ceilings, whose = own_ceilings(self.unfused)
        if ceilings is None:
            raise ValueError(f"{self.name}: expected a GPU with a target pack, not {whose}")
        size = sum(reason.bytes_saved or 0 for reason in missed(self.unfused))
        return {
            PRICE: together(with_predictions(self.unfused, ceilings), ceilings).us,
            UNPREDICTED: together(self.unfused, ceilings).us, BYTES: size / ceilings.bandwidth(1, 1) * 1e6,
        }

    def ratio(self, method: str) -> float | None:
        expected = self.expected_us[method]
        return self.realised_us / expected if self.realised_us is not None and expected else None


def read(file: Path) -> list[Forced]:
    found: dict[str, Any] = json.loads(file.read_text())
    return [
        Forced(
            one["name"], one["size"], tuple(one["kernels"]), one["realised"] and one["realised"]["mean"],
            store.from_json(found["cases"][one["name"]]["graphs"]["unfused"]),
        )
        for one in found["outcomes"]
    ]


def cases(found: Iterable[Forced]) -> list[list[str]]:
    """Return a line for each case that counts."""
    return [
        [
            f"`{one.name}`", " → ".join(map(str, one.kernels)), number(one.expected_us[PRICE]),
            number(one.realised_us), f"{ratio:.2f}",
        ]
        for one in found if (ratio := one.ratio(PRICE)) is not None
    ]


def sizes(found: Iterable[Forced]) -> list[list[str]]:
    """Return a line for all cases, and for those of each size of the intermediate."""
    counted = [one for one in found if one.realised_us is not None]
    groups = {"all": counted} | {
        size: [one for one in counted if one.size == size] for size in dict.fromkeys(one.size for one in counted)
    }
    return [
        [f"{len(group)} {name}", *_range(group, PRICE), *_range(group, UNPREDICTED)] for name, group in groups.items()
    ]


def methods(found: Iterable[Forced]) -> list[list[str]]:
    """Return a line for each way to expect a saving."""
    listed, lines = list(found), []
    for method in (PRICE, UNPREDICTED, BYTES):
        ratios = _ratios(listed, method)
        error = statistics.median(abs(1 / ratio - 1) for ratio in ratios)
        lines.append([method, str(len(ratios)), *_range(listed, method), f"{error:.0%}"])
    return lines


def _ratios(found: Iterable[Forced], method: str) -> list[float]:
    return [ratio for one in found if (ratio := one.ratio(method)) is not None]


def _range(cases: Iterable[Forced], method: str) -> tuple[str, str]:
    ratios = _ratios(cases, method)
    if len(ratios) == 2:
        low, high = sorted(ratios)
        return f"{statistics.median(ratios):.2f}", f"{low:.2f} and {high:.2f}"
    found = summary_of(ratios)
    return ("", "") if found is None else (f"{found.median:.2f}", f"{found.low:.2f} to {found.high:.2f}")
