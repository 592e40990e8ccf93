"""The predicted time of an exchange between GPUs: a latency, and the bytes that one sends at a share of a link's rate.

The latency and the shares were measured between two GPUs (`python -m tools.links`). The rate is the data sheet's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from .. import targets
from ..graph import formats
from ..graph.analyse.exchange import COPY, Exchange, exchange_of
from ..graph.model import Kernel, PredictedTime

FILE = "links.json"
FITTED_ON = "h200"
MEASURED = "NVLink"  # the links over which exchanges were measured
SMALL = 1 << 20  # bytes; below, the time is the latency
PASSES = {"all-reduce": 2}  # a reduce-scatter and an all-gather


@dataclass(frozen=True)
class LinkTimes:
    """The fit between two GPUs.

    latencies_us: of a "collective", of a "copy". shares: of the link's rate, by `class_of`. intervals: the low and the
    high end over the time, by `errors_of`.
    """

    latencies_us: Mapping[str, float]
    shares: Mapping[str, float]
    intervals: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    def us(self, exchange: Exchange, rate: float, share: float | None = None) -> float:
        """Return the time of one exchange over links of so many bytes per second in one direction."""
        reached = rate * (share or self.shares[class_of(exchange)])
        return self.fixed_us(exchange) + exchange.sent_bytes / reached * 1e6

    def fixed_us(self, exchange: Exchange) -> float:
        """Return the time that does not depend on the bytes."""
        return self.latencies_us[latency_of(exchange)] * PASSES.get(exchange.opcode, 1)


def latency_of(exchange: Exchange) -> str:
    return "copy" if exchange.opcode == COPY else "collective"


def class_of(exchange: Exchange) -> str:
    """Return what runs an exchange: a copy engine, or kernels of NCCL, which are slower beside other kernels."""
    if exchange.opcode == COPY:
        return "copy engine"
    kernels = "send and receive" if exchange.opcode in ("all-to-all", "collective-permute") else "ring"
    return f"{kernels}, beside other kernels" if exchange.overlaps else kernels


def errors_of(exchange: Exchange) -> str:
    """Return which exchanges give the interval of a prediction: those of the same class, or other small ones."""
    return class_of(exchange) if exchange.sent_bytes >= SMALL else f"{latency_of(exchange)}, below 1 MiB"


@cache
def fitted() -> LinkTimes:
    found = record()
    intervals = {name: (low, high) for name, (low, high) in found["intervals"].items()}
    return LinkTimes(found["latencies_us"], found["shares"], intervals)


@cache
def record() -> dict[str, Any]:
    """Return the contents of FILE: the fit, and the measured exchanges with their predictions."""
    found: dict[str, Any] = json.loads((targets.FOLDER / FITTED_ON / FILE).read_text())
    return found


def predicted(kernel: Kernel, target: str) -> PredictedTime:
    """Return the time of all launches of a collective or copy on GPUs of a target pack, or why there is none.

    On other links than the measured ones, or between more GPUs, the interval begins at the full rate of the data sheet,
    and ends as far above as any.
    """
    link, exchange = targets.load(target).link, exchange_of(kernel)
    if exchange is None:
        return PredictedTime(reason="the bytes that it sends are not known")
    if link is None or not link.name.startswith(MEASURED):
        over = "its links are not known" if link is None else f"its links are {link.name}"
        return PredictedTime(reason=f"exchanges were measured over {MEASURED} only; of {target}, {over}")
    if kernel.launches is None:
        return PredictedTime(reason="the number of its launches is unknown")
    times = fitted()
    one, (lowest, highest) = times.us(exchange, link.rate), times.intervals[errors_of(exchange)]
    low = one * lowest
    if link.name != record()["link"] or exchange.gpus > record()["gpus"]:
        low = min(low, times.us(exchange, link.rate, share=1.0))
        highest = max(high for _, high in times.intervals.values())
    count = kernel.launches
    return PredictedTime(one * count, low * count, one * highest * count)


def why(kernel: Kernel, target: str) -> list[str]:
    """Return what drives the prediction, in words."""
    link, exchange = targets.load(target).link, exchange_of(kernel)
    if link is None or exchange is None:
        return []
    share = fitted().shares[class_of(exchange)]
    return [
        f"one of {exchange.gpus} GPUs sends {formats.size(exchange.sent_bytes)} over {link.name}: {class_of(exchange)}",
        f"at {share:.0%} of {formats.size(link.rate)}/s in one direction, as {record()['gpus']} {FITTED_ON} did",
        f"latency: {fitted().fixed_us(exchange):.1f} us",
    ]
