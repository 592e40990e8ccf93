"""Fit the times of exchanges between two GPUs: `python -m tools.links [RUN]` writes links.json of the target pack.

RUN holds programs of XLA and PyTorch over two GPUs with timelines. NCCL's kernels wait for the other GPU, so the time
of an exchange is that of the GPU that began it last. A copy waits for none; the first GPU's counts. Each exchange is
also predicted without its implementation's programs of the block; the errors of these predictions give the intervals.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from xlafuse.compare import targets
from xlafuse.compare.base import atomic_write
from xlafuse.compare.base.exchange_kernels import PEER_COPY, moves_between_gpus
from xlafuse.compare.base.paths import PROJECT
from xlafuse.compare.base.text import number
from xlafuse.compare.graph.analyse.exchange import COPY, Exchange, exchange_of
from xlafuse.compare.graph.model import Kernel
from xlafuse.compare.measure import timeline
from xlafuse.compare.predict.links import (
    FILE,
    FITTED_ON,
    PASSES,
    SMALL,
    LinkTimes,
    class_of,
    errors_of,
    fitted,
    latency_of,
    record,
)
from xlafuse.compare.record.run_files import recorded_file
from xlafuse.compare.record.run_folder import read_run
from xlafuse.compare.sources.result import Result
from xlafuse.compare.sources.run_source import open_run

RUN = PROJECT / "reports" / "h200-x2"
PROGRAMS = ["block", "implementation", "direction", "exchanges", "sent MB", "measured, µs", "predicted, µs", "error"]
RATES = ["runs by", "latency, µs", "share of the rate", "interval of the time"]
KINDS = ["exchange", "exchanges", "measured GB/s", "median error", "nine of ten", "in interval"]
_KERNELS = {
    "all-gather": "AllGather", "reduce-scatter": "ReduceScatter", "all-reduce": "AllReduce", "all-to-all": "SendRecv",
    "collective-permute": "SendRecv",
}


@dataclass(frozen=True)
class Measured:
    """One exchange of a call, and the program that made it."""

    block: str
    direction: str
    implementation: str
    exchange: Exchange
    us: float


def exchanges(run: Path) -> list[Measured]:
    """Return the exchanges of one call of each program whose exchanges all have known bytes and times.

    XLA's ragged exchanges have no bytes. PyTorch's products with an exchange inside ("symm_mem") are no collectives.
    """
    return [one for result in open_run(run).results for one in _of(result)]


def _of(result: Result) -> Iterable[Measured]:
    row, saved = result.row, result.record
    if saved is None or saved.trace is None or saved.trace.file is None:
        return
    kernels = [k for k in result.load().kernels or () if k.kind == "collective" for _ in range(k.certain_launches)]
    found = [exchange_of(_with_facts(kernel, saved.case.ranks)) for kernel in kernels]
    known = [exchange for exchange in found if exchange is not None]
    copies = [kernel for kernel, each in zip(kernels, found, strict=True) if each is not None and each.opcode == COPY]
    if len(known) < len(found) or any(kernel.device_time_us is None for kernel in copies):
        return
    ranks = timeline.launches_of_ranks(timeline.load(recorded_file(result.path, saved, saved.trace.file)))
    ran = zip(*(_collectives(events) for events in ranks), strict=True)
    for kernel, exchange in zip(kernels, known, strict=True):
        if exchange.opcode == COPY:
            us = (kernel.device_time_us or 0.0) / kernel.certain_launches
        else:
            events = next(ran)
            if not all(_KERNELS[exchange.opcode] in event["args"]["runtime_name"] for event in events):
                raise ValueError(f"{result.id}: expected a {exchange.opcode}, got {events[0]['args']['runtime_name']}")
            us = min(event["dur"] for event in events)
        yield Measured(row.block, row.direction, row.implementation, exchange, us)
    if left := [*ran]:
        raise ValueError(f"{result.id}: {len(left)} exchanges ran that its graph does not have")


def _collectives(events: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a rank's events of NCCL's kernels in order of time; its copies are known by their kernels."""
    names = (event for event in events if event["args"]["runtime_name"] != PEER_COPY)
    return sorted((e for e in names if moves_between_gpus(e["args"]["runtime_name"])), key=lambda e: e["ts"])


def _with_facts(kernel: Kernel, gpus: int) -> Kernel:
    """Return the kernel with the facts that graphs of older runs lack; XLA's are of jax 0.11."""
    overlaps = str(kernel.facts.get("opcode", "")).endswith("-start")
    return replace(kernel, facts={"gpus": gpus, "overlaps": overlaps, **kernel.facts})


def fit(measured: Sequence[Measured], rate: float) -> LinkTimes:
    """Return the medians: of small exchanges, the latency; of large ones of each class, the share of the rate."""
    latencies: dict[str, list[float]] = {}
    for one in measured:
        if not _is_large(one):
            latencies.setdefault(latency_of(one.exchange), []).append(one.us / PASSES.get(one.exchange.opcode, 1))
    times = LinkTimes({name: median(found) for name, found in sorted(latencies.items())}, {})
    shares: dict[str, list[float]] = {}
    for one in filter(_is_large, measured):
        passing = one.us - times.fixed_us(one.exchange)
        shares.setdefault(class_of(one.exchange), []).append(one.exchange.sent_bytes / (passing * 1e-6) / rate)
    return replace(times, shares={name: median(found) for name, found in sorted(shares.items())})


def _is_large(one: Measured) -> bool:
    return one.exchange.sent_bytes >= SMALL


def predicted_by_others(measured: Sequence[Measured], rate: float) -> list[float]:
    """Return for each exchange its time by a fit without its implementation's programs of the block."""
    found = []
    for one in measured:
        own = one.block, one.implementation
        others = fit([other for other in measured if (other.block, other.implementation) != own], rate)
        found.append(others.us(one.exchange, rate))
    return found


def validated(measured: Sequence[Measured], gpus: int) -> dict[str, Any]:
    """Return the contents of FILE. An interval holds the ratios of four of five of its exchanges."""
    link = targets.load(FITTED_ON).link
    assert link is not None
    guesses = predicted_by_others(measured, link.rate)
    ratios: dict[str, list[float]] = {}
    for one, guess in zip(measured, guesses, strict=True):
        ratios.setdefault(errors_of(one.exchange), []).append(one.us / guess)
    tenths = {name: quantiles(found, n=10) for name, found in sorted(ratios.items())}
    times = fit(measured, link.rate)
    return {
        "link": link.name, "rate": link.rate, "gpus": gpus,
        "latencies_us": {name: round(us, 2) for name, us in times.latencies_us.items()},
        "shares": {name: round(share, 4) for name, share in times.shares.items()},
        "intervals": {name: [round(found[0], 3), round(found[-1], 3)] for name, found in tenths.items()},
        "exchanges": [
            {
                "block": m.block, "direction": m.direction, "implementation": m.implementation, **vars(m.exchange),
                "measured_us": round(m.us, 2), "predicted_us": round(guess, 2),
            }
            for m, guess in zip(measured, guesses, strict=True)
        ],
    }


def rate_lines() -> list[list[str]]:
    """Return a line for each class: the fit."""
    times, lines = fitted(), []
    for name, share in times.shares.items():
        low, high = times.intervals[name]
        latency = times.latencies_us["copy" if name == class_of(Exchange(COPY, 2, 0.0)) else "collective"]
        lines.append([name, f"{latency:.1f}", f"{share:.0%}", f"{low - 1:+.0%} to {high - 1:+.0%}"])
    return lines


def program_lines() -> list[list[str]]:
    """Return a line for each program: what its exchanges take together."""
    programs: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for one in record()["exchanges"]:
        programs.setdefault((one["block"], one["implementation"], one["direction"]), []).append(one)
    lines = []
    for (block, implementation, direction), found in sorted(programs.items()):
        size, took, guess = (sum(one[name] for one in found) for name in ("sent_bytes", "measured_us", "predicted_us"))
        lines.append([
            f"`{block}`", f"`{implementation}`", direction, str(len(found)), number(size / 1e6), number(took),
            f"~{number(guess)}", f"{guess / took - 1:+.0%}",
        ])
    return lines


def kind_lines() -> list[list[str]]:
    """Return a line for each collective, alone and beside other kernels; small ones have lines of their own."""
    kinds: dict[str, list[dict[str, Any]]] = {}
    for one in record()["exchanges"]:
        size = "" if one["sent_bytes"] >= SMALL else ", below 1 MiB"
        kinds.setdefault(one["opcode"] + size + ", beside other kernels" * one["overlaps"], []).append(one)
    lines = []
    for kind, found in sorted(kinds.items()):
        ratios = [one["measured_us"] / one["predicted_us"] for one in found]
        errors = sorted(abs(1 / ratio - 1) for ratio in ratios)
        rate = median(one["sent_bytes"] / one["measured_us"] / 1e3 for one in found)
        low, high = record()["intervals"][errors_of(_exchange(found[0]))]
        inside = sum(low <= ratio <= high for ratio in ratios) / len(ratios)
        lines.append([
            kind, str(len(found)), number(rate), f"{median(errors):.0%}",
            f"{errors[math.ceil(0.9 * len(errors)) - 1]:.0%}", f"{inside:.0%}",
        ])
    return lines


def _exchange(one: dict[str, Any]) -> Exchange:
    return Exchange(*(one[name] for name in ("opcode", "gpus", "sent_bytes", "overlaps")))


if __name__ == "__main__":
    source = Path(sys.argv[1]) if len(sys.argv) > 1 else RUN
    content, pack = validated(exchanges(source), gpus=2), targets.load(FITTED_ON)
    atomic_write.write(pack.folder / FILE, f"{json.dumps(content, indent=1)}\n".encode())
    sources = json.loads((pack.folder / "provenance.json").read_text())
    sources[FILE] = {
        "run": source.name, "created": read_run(source)["created"], "device": pack.device,
        "entries": len(content["exchanges"]),
    }
    atomic_write.write(pack.folder / "provenance.json", f"{json.dumps(sources, indent=1, sort_keys=True)}\n".encode())
