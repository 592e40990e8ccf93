"""Fit the times of exchanges between two GPUs: `python -m tools.links [RUN]` writes links.json of the target pack.

RUN holds programs of XLA over two GPUs with timelines. NCCL's kernels wait for the other GPU, so the time of an
exchange is that of the GPU that began it last. Each exchange is also predicted without its implementation's programs of
the block; the errors of these predictions give the interval.
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
from xlafuse.compare.base.exchange_kernels import moves_between_gpus
from xlafuse.compare.base.paths import PROJECT
from xlafuse.compare.base.text import number
from xlafuse.compare.graph.analyse.exchange import Exchange, exchange_of
from xlafuse.compare.graph.model import Kernel
from xlafuse.compare.measure import timeline
from xlafuse.compare.predict.links import FILE, FITTED_ON, PASSES, LinkTimes, class_of, record
from xlafuse.compare.record.run_files import recorded_file
from xlafuse.compare.record.run_folder import read_run
from xlafuse.compare.sources.result import Result
from xlafuse.compare.sources.run_source import open_run

RUN = PROJECT / "reports" / "h200-x2"
SMALL = 1 << 20  # bytes; below, the time is the latency
PROGRAMS = ["block", "implementation", "direction", "exchanges", "sent MB", "measured, µs", "predicted, µs", "error"]
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
    """Return the exchanges of one call of each of XLA's programs. Programs with ragged exchanges are left out."""
    ran = (result for result in open_run(run).results if result.row.implementation.startswith("xla"))
    return [one for result in ran for one in _of(result)]


def _of(result: Result) -> Iterable[Measured]:
    row, saved = result.row, result.record
    if saved is None or saved.trace is None or saved.trace.file is None:
        return
    kernels = [k for k in result.load().kernels or () if k.kind == "collective" for _ in range(k.certain_launches)]
    known = [exchange_of(_with_gpus(kernel, saved.case.ranks)) for kernel in kernels]
    ranks = timeline.launches_of_ranks(timeline.load(recorded_file(result.path, saved, saved.trace.file)))
    ran = [
        sorted((event for event in events if moves_between_gpus(event["args"]["runtime_name"])), key=lambda e: e["ts"])
        for events in ranks
    ]
    if None in known:
        return
    for exchange, events in zip(known, zip(*ran, strict=True), strict=True):
        assert exchange is not None
        if not all(_KERNELS[exchange.opcode] in event["args"]["runtime_name"] for event in events):
            raise ValueError(f"{result.id}: expected a {exchange.opcode}, got {events[0]['args']['runtime_name']}")
        yield Measured(
            row.block, row.direction, row.implementation, exchange, min(event["dur"] for event in events)
        )


def _with_gpus(kernel: Kernel, gpus: int) -> Kernel:
    """Return the kernel with the facts that graphs of older runs lack; those are of jax 0.11."""
    overlaps = str(kernel.facts.get("opcode", "")).endswith("-start")
    return replace(kernel, facts={"gpus": gpus, "overlaps": overlaps, **kernel.facts})


def fit(measured: Sequence[Measured], rate: float, low: float = 1.0, high: float = 1.0) -> LinkTimes:
    """Return the medians: of small exchanges, the latency; of large ones of each class, the share of the rate."""
    latency = median(one.us / PASSES.get(one.exchange.opcode, 1) for one in measured if not _is_large(one))
    shares: dict[str, list[float]] = {}
    for one in filter(_is_large, measured):
        passing = one.us - latency * PASSES.get(one.exchange.opcode, 1)
        shares.setdefault(class_of(one.exchange), []).append(one.exchange.sent_bytes / (passing * 1e-6) / rate)
    return LinkTimes(latency, {name: median(found) for name, found in sorted(shares.items())}, low, high)


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
    """Return the contents of FILE. The interval holds the ratios of four of five large exchanges."""
    link = targets.load(FITTED_ON).link
    assert link is not None
    guesses = predicted_by_others(measured, link.rate)
    tenths = quantiles((m.us / guess for m, guess in zip(measured, guesses, strict=True) if _is_large(m)), n=10)
    times = fit(measured, link.rate, tenths[0], tenths[-1])
    return {
        "link": link.name, "rate": link.rate, "gpus": gpus, "latency_us": round(times.latency_us, 2),
        "shares": {name: round(share, 4) for name, share in times.shares.items()},
        "low": round(times.low, 3), "high": round(times.high, 3),
        "exchanges": [
            {
                "block": m.block, "direction": m.direction, "implementation": m.implementation, **vars(m.exchange),
                "measured_us": round(m.us, 2), "predicted_us": round(guess, 2),
            }
            for m, guess in zip(measured, guesses, strict=True)
        ],
    }


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
        inside = sum(record()["low"] <= ratio <= record()["high"] for ratio in ratios) / len(ratios)
        lines.append([
            kind, str(len(found)), number(rate), f"{median(errors):.0%}",
            f"{errors[math.ceil(0.9 * len(errors)) - 1]:.0%}", f"{inside:.0%}",
        ])
    return lines


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
