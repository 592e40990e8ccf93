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
from xlafuse.compare.graph.analyse.missed_fusions import missed, ranked, together
from xlafuse.compare.graph.model import FusionGraph
from xlafuse.compare.graph.operations import is_product
from xlafuse.compare.predict.features import Device
from xlafuse.compare.predict.predictor import FITTED_ON, device_of
from xlafuse.compare.sources.target_ceilings import own_ceilings

from .outcome import summary_of
from .predicted import saved_us

CASES = ["case", "kernels", "price", "realised", "realised / price"]
SIZES = ["cases", "median", "10% to 90%", "sum of `bytes_saved` / bandwidth as the price: median", "10% to 90%"]
PAIRS = ["step", "of a product", "missed fusions", "no saving", "median of predicted / price", "10% to 90%"]
_LEAST_US = 5.0  # of a price; smaller ones are mostly launches
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
        """The saving by its price, by the reasons' bytes alone, and by predicted times."""
        ceilings, _ = own_ceilings(self.unfused)
        if ceilings is None or (device := device_of(self.unfused, ceilings)) is None:
            raise ValueError(f"{self.name}: expected a GPU with predictions, not {self.unfused.target!r}")
        size = sum(reason.bytes_saved or 0 for reason in missed(self.unfused))
        return {
            "bytes and launches, the price": together(self.unfused, ceilings).us,
            "bytes": size / ceilings.bandwidth(1, 1) * 1e6,
            "predicted times": saved_us(self.unfused, device, range(len(self.unfused.kernels or ()))),
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


PRICE, BYTES, PREDICTED = "bytes and launches, the price", "bytes", "predicted times"


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
        [f"{len(group)} {name}", *_range(group, PRICE), *_range(group, BYTES)] for name, group in groups.items()
    ]


def methods(found: Iterable[Forced]) -> list[list[str]]:
    """Return a line for the price, and for predicted times."""
    listed, lines = list(found), []
    for method in (PRICE, PREDICTED):
        ratios = _ratios(listed, method)
        error = statistics.median(abs(1 / ratio - 1) for ratio in ratios)
        lines.append([method, str(len(ratios)), *_range(listed, method), f"{error:.0%}"])
    return lines


def pairs(graphs: Mapping[str, FusionGraph]) -> list[list[str]]:
    """Return a line for each graph: the predicted savings of its missed fusions over their prices."""
    device = Device.named(FITTED_ON)
    lines = []
    for name, graph in graphs.items():
        found: dict[bool, list[float]] = {True: [], False: []}  # of pairs with a product, and of others
        for one in ranked(graph, device.ceilings):
            ends = [graph.named.get(end, ()) for end in (one.reason.producer, one.reason.consumer)]
            if [len(end) for end in ends] != [1, 1] or (one.price.us or 0.0) < _LEAST_US:
                continue
            saved = saved_us(graph, device, [end[0] for end in ends])
            if saved is not None and one.price.us:
                has_product = any(is_product((graph.kernels or ())[end[0]]) for end in ends)
                found[has_product].append(saved / one.price.us)
        for has_product, ratios in found.items():
            tenths = statistics.quantiles(ratios, n=10, method="inclusive")
            lines.append([
                f"`{name}`", "yes" if has_product else "", str(len(ratios)), str(sum(ratio <= 0 for ratio in ratios)),
                f"{statistics.median(ratios):.2f}", f"{tenths[0]:.2f} to {tenths[-1]:.2f}",
            ])
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
