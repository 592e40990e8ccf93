"""The predicted time of an exchange between GPUs: a latency, and the bytes that one sends at a share of a link's rate.

The latency and the shares were measured between two GPUs (`python -m tools.links`). The rate is the data sheet's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from .. import targets
from ..graph import formats
from ..graph.analyse.exchange import Exchange, exchange_of
from ..graph.model import Kernel, PredictedTime

FILE = "links.json"
FITTED_ON = "h200"
MEASURED = "NVLink"  # the links over which exchanges were measured
PASSES = {"all-reduce": 2}  # a reduce-scatter and an all-gather


@dataclass(frozen=True)
class LinkTimes:
    """The fit between two GPUs. shares: of the link's rate, by `class_of`. low, high: the interval over the time."""

    latency_us: float
    shares: Mapping[str, float]
    low: float
    high: float

    def us(self, exchange: Exchange, rate: float, share: float | None = None) -> float:
        """Return the time of one exchange over links of so many bytes per second in one direction."""
        reached = rate * (share or self.shares[class_of(exchange)])
        return self.latency_us * PASSES.get(exchange.opcode, 1) + exchange.sent_bytes / reached * 1e6


def class_of(exchange: Exchange) -> str:
    """Return the kernels of NCCL that run an exchange; beside other kernels they are slower."""
    kernels = "send and receive" if exchange.opcode in ("all-to-all", "collective-permute") else "ring"
    return f"{kernels}, beside other kernels" if exchange.overlaps else kernels


@cache
def fitted() -> LinkTimes:
    found = record()
    return LinkTimes(found["latency_us"], found["shares"], found["low"], found["high"])


@cache
def record() -> dict[str, Any]:
    """Return the contents of FILE: the fit, and the measured exchanges with their predictions."""
    found: dict[str, Any] = json.loads((targets.FOLDER / FITTED_ON / FILE).read_text())
    return found


def predicted(kernel: Kernel, target: str) -> PredictedTime:
    """Return the time of all launches of a collective on GPUs of a target pack, or why there is none.

    On other links than the measured ones, or between more GPUs, the interval begins at the full rate of the data sheet.
    """
    link, exchange = targets.load(target).link, exchange_of(kernel)
    if exchange is None:
        return PredictedTime(reason="the bytes that it sends are not known")
    if link is None or not link.name.startswith(MEASURED):
        over = "its links are not known" if link is None else f"its links are {link.name}"
        return PredictedTime(reason=f"exchanges were measured over {MEASURED} only; of {target}, {over}")
    if kernel.launches is None:
        return PredictedTime(reason="the number of its launches is unknown")
    one, times = fitted().us(exchange, link.rate), fitted()
    low = one * times.low
    if link.name != record()["link"] or exchange.gpus > record()["gpus"]:
        low = min(low, times.us(exchange, link.rate, share=1.0))
    count = kernel.launches
    return PredictedTime(one * count, low * count, one * times.high * count)


def why(kernel: Kernel, target: str) -> list[str]:
    """Return what drives the prediction, in words."""
    link, exchange = targets.load(target).link, exchange_of(kernel)
    if link is None or exchange is None:
        return []
    share = fitted().shares[class_of(exchange)]
    return [
        f"one of {exchange.gpus} GPUs sends {formats.size(exchange.sent_bytes)} over {link.name}: {class_of(exchange)}",
        f"at {share:.0%} of {formats.size(link.rate)}/s in one direction, as {record()['gpus']} {FITTED_ON} did",
        f"latency: {fitted().latency_us * PASSES.get(exchange.opcode, 1):.1f} us",
    ]
