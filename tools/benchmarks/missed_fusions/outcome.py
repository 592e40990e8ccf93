"""The outcome of a case: predicted and realised saving, what is wrong with the pair, and the summary of all."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from xlafuse.compare.graph import store
from xlafuse.compare.graph.analyse.missed_fusions import together
from xlafuse.compare.graph.model import FusionGraph
from xlafuse.compare.plan.speedup import Saving, saving
from xlafuse.compare.predict.times import with_predictions
from xlafuse.compare.sources.target_ceilings import own_ceilings


@dataclass(frozen=True)
class Outcome:
    """One case. predicted_us: the price of all missed fusions of the unfused program together.

    realised, busy: the saving in device and in busy time, µs; None without a GPU, and where the pair does not count.
    problems: the reasons why it does not.
    """

    name: str
    compiler: str
    size: str
    kernels: tuple[int, int]
    predicted_us: float
    realised: Saving | None
    busy: Saving | None
    problems: tuple[str, ...]

    @property
    def ratio(self) -> float | None:
        return None if self.realised is None or self.problems else self.realised.mean / self.predicted_us


class UnknownBandwidth(Exception):
    """A GPU without a target pack."""


def failed(name: str, compiler: str, problem: str) -> Outcome:
    """Return the outcome of a case whose worker failed."""
    return Outcome(name, compiler, "", (0, 0), 0.0, None, None, (problem,))


def outcome(name: str, size: str, reply: Mapping[str, Any]) -> Outcome:
    """Return the outcome from a worker's reply; `measured` says what a reply with earlier times has besides."""
    unfused, fused = (store.from_json(reply["graphs"][program]) for program in ("unfused", "fused"))
    predicted = _price(unfused)
    problems = list(reply.get("problems", ()))
    if not predicted:
        problems.append("no missed fusion has a price in the unfused program")
    if left := _price(fused):
        problems.append(f"the fused program still misses fusions worth {left:.3g} µs")
    if not reply["error"] <= reply["tolerance"]:
        problems.append(f"the results differ by {reply['error']:.2g}, more than {reply['tolerance']:.2g}")
    counts = reply.get("kernels") or (len(unfused.kernels or ()), len(fused.kernels or ()))
    rounds = None if problems else reply.get("rounds")
    realised, busy = (_saving(rounds, time) for time in ("device_us", "busy_us"))
    return Outcome(name, unfused.compiler, size, counts, predicted, realised, busy, tuple(problems))


def _price(graph: FusionGraph) -> float:
    ceilings, _ = own_ceilings(graph)
    if ceilings is None:
        raise UnknownBandwidth(f"the bandwidth of {graph.target!r} is not known: no target pack is of this GPU")
    return together(with_predictions(graph, ceilings), ceilings).us or 0.0


def _saving(rounds: Mapping[str, Sequence[Mapping[str, Any]]] | None, time: str) -> Saving | None:
    if rounds is None:
        return None
    unfused, fused = ([one[time] for one in rounds[program]] for program in ("unfused", "fused"))
    return None if None in unfused + fused else saving(unfused, fused)


@dataclass(frozen=True)
class Summary:
    """Realised over predicted savings: the number of cases, their median, and the range of the middle 80%."""

    cases: int
    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.cases} cases: median {self.median:.2f}, 10% to 90%: {self.low:.2f} to {self.high:.2f}"


def summary(outcomes: Iterable[Outcome]) -> Summary | None:
    """Return the summary of the cases that count; None for fewer than two."""
    return summary_of([one.ratio for one in outcomes if one.ratio is not None])


def summary_of(ratios: Sequence[float]) -> Summary | None:
    if len(ratios) < 2:
        return None
    tenths = statistics.quantiles(ratios, n=10, method="inclusive")
    return Summary(len(ratios), statistics.median(ratios), tenths[0], tenths[-1])
