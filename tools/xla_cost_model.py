"""Hold XLA's cost models against measured times: `python -m tools.xla_cost_model COMPILED MEASURED [-o FILE]`.

COMPILED is a run that was compiled for the GPU of the run MEASURED, in an environment with
XLA_FLAGS=--xla_gpu_collect_cost_model_stats=true. Kernels of one record are joined where they do the same work with the
same configuration. FILE (docs/xla-cost-model.json) has the sums from which `python -m tools.tables` makes the tables of
docs/xla-cost-model.md.
"""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from xlafuse.compare.base import atomic_write
from xlafuse.compare.base.text import number
from xlafuse.compare.graph.analyse.summary import fingerprint
from xlafuse.compare.graph.model import FusionGraph, Kernel
from xlafuse.compare.graph.operations import kind_by_operations
from xlafuse.compare.sources.opening import open_source
from xlafuse.compare.sources.source import Source

LEAST_US = 5.0  # of a launch: below, the launch itself decides
SIZES = ((5.0, "5 to 20 µs"), (20.0, "20 to 100 µs"), (100.0, "100 µs and more"))
MOST_DECISIONS = 15


@dataclass(frozen=True)
class Estimate:
    """A model's estimate of one launch beside the measured time. kernel: of the record."""

    record: str
    kernel: Kernel
    model: str
    estimate_us: float
    measured_us: float

    @property
    def ratio(self) -> float:
        return self.estimate_us / self.measured_us

    @property
    def kind(self) -> str:
        return kind_by_operations(self.kernel)

    @property
    def size(self) -> str:
        return next(name for least, name in reversed(SIZES) if self.measured_us >= least)


@dataclass(frozen=True)
class Decision:
    """Two kernels that XLA did not fuse, because it expected the fused one to be slower.

    measured_us: of both kernels in a call.
    """

    record: str
    producer: str
    consumer: str
    fused_us: float
    unfused_us: float
    measured_us: float

    @property
    def ratio(self) -> float:
        return self.unfused_us / self.measured_us


def joined(compiled: Source, measured: Source) -> Iterator[tuple[str, FusionGraph, dict[int, float]]]:
    """Yield records of both with the compiled graph, and the measured microseconds of its kernels in a call."""
    others = {result.id: result for result in measured.results}
    for result in compiled.results:
        other = others.get(result.id)
        if other is None or result.graph is None or other.graph is None:
            continue
        times: dict[str, list[float | None]] = defaultdict(list)
        for key, kernel in zip(_keys(other.graph), other.graph.kernels or (), strict=True):
            if key is not None:
                times[key].append(kernel.device_time_us)
        known = {}
        for index, key in enumerate(_keys(result.graph)):
            if key is not None and times[key] and (time := times[key].pop(0)):
                known[index] = time
        yield result.id, result.graph, known


def _keys(graph: FusionGraph) -> list[str | None]:
    """Return the fingerprint of each kernel alone."""
    return [fingerprint(replace(graph, kernels=(kernel,))) for kernel in graph.kernels or ()]


def estimates(records: Iterable[tuple[str, FusionGraph, dict[int, float]]]) -> list[Estimate]:
    """Return an estimate for each model and distinct kernel: one of the same work in several records counts once."""
    found: dict[object, Estimate] = {}
    for record, graph, times in records:
        for index, time in times.items():
            kernel = (graph.kernels or ())[index]
            each_us = time / kernel.certain_launches if kernel.certain_launches else 0.0
            if each_us < LEAST_US:
                continue
            work = _keys(replace(graph, kernels=(kernel,)))[0]
            for model, us in (kernel.facts.get("xla_estimates_us") or {}).items():
                found.setdefault((record.partition("/")[0], work, model), Estimate(record, kernel, model, us, each_us))
    return list(found.values())


def decisions(records: Iterable[tuple[str, FusionGraph, dict[int, float]]]) -> list[Decision]:
    """Return the pairs that XLA expected to be slower as one kernel, of which both kernels were measured."""
    found = []
    for record, graph, times in records:
        for reason in graph.reasons:
            ends = [graph.named.get(name, ()) for name in (reason.producer, reason.consumer)]
            if reason.fused_us is None or not reason.unfused_us or any(len(indices) != 1 for indices in ends):
                continue
            pair = [times.get(indices[0]) for indices in ends]
            if all(pair):
                total = sum(time or 0.0 for time in pair)
                found.append(
                    Decision(record, reason.producer, reason.consumer, reason.fused_us, reason.unfused_us, total)
                )
    return found


def summary(found: Sequence[Estimate]) -> dict[str, Any]:
    """Return number, errors and ratios of estimates: shares of the measured time."""
    ratios = sorted(one.ratio for one in found)
    tenth = len(ratios) // 10
    errors = [abs(ratio - 1) for ratio in ratios]
    total = sum(one.measured_us for one in found)
    return {
        "kernels": len(found), "median_error": statistics.median(errors), "median_ratio": statistics.median(ratios),
        "low": ratios[tenth], "high": ratios[-1 - tenth],
        "by_time": sum(abs(one.estimate_us - one.measured_us) for one in found) / total,
    }


def document(compiled: Source, measured: Source) -> dict[str, Any]:
    """Return all sums: by model, by model and kind, by model and size, and the decisions with the worst estimates."""
    records = list(joined(compiled, measured))
    found, decided = estimates(records), decisions(records)
    groups: dict[str, dict[tuple[str, str], list[Estimate]]] = {"": defaultdict(list)}
    groups |= {"kind": defaultdict(list), "size": defaultdict(list)}
    for one in found:
        groups[""][one.model, ""].append(one)
        groups["kind"][one.model, one.kind].append(one)
        groups["size"][one.model, one.size].append(one)
    worst = sorted(decided, key=lambda one: -abs(one.unfused_us - one.measured_us))
    ratios = sorted(one.ratio for one in decided)
    return {
        "compiled": {"versions": _versions(compiled), "records": len(records)},
        "estimates": [
            {"by": by, "model": model, "group": group, **summary(own)}
            for by, split in groups.items() for (model, group), own in sorted(split.items())
        ],
        "decisions": {
            "number": len(decided),
            "ratios": [ratios[int(share * (len(ratios) - 1))] for share in (0.1, 0.5, 0.9)] if ratios else [],
            "worst": [
                {**one.__dict__, "ratio": one.ratio} for one in worst[:MOST_DECISIONS]
            ],
        },
    }


def _versions(source: Source) -> dict[str, str]:
    return next((dict(result.graph.versions) for result in source.results if result.graph is not None), {})


HEADERS = ["model", "kernels", "median error", "error by time", "median estimate / measured", "10% to 90%"]
DECISION_HEADERS = [
    "record", "producer → consumer", "XLA: fused µs", "XLA: two kernels µs", "measured µs", "XLA / measured",
]


def lines(data: Mapping[str, Any], by: str) -> list[list[str]]:
    """Return a line of a table for each model, or each model and group. by: "", "kind" or "size"."""
    return [
        [
            f"`{line['model']}`" + (f", {line['group']}" if by else ""), str(line["kernels"]),
            f"{line['median_error']:.0%}", f"{line['by_time']:.0%}", number(line["median_ratio"]),
            f"{number(line['low'])} to {number(line['high'])}",
        ]
        for line in data["estimates"] if line["by"] == by
    ]


def decision_lines(data: Mapping[str, Any]) -> list[list[str]]:
    """Return a line for each of the decisions with the worst estimates."""
    return [
        [
            one["record"], f"{one['producer']} → {one['consumer']}", number(one["fused_us"]), number(one["unfused_us"]),
            number(one["measured_us"]), number(one["ratio"]),
        ]
        for one in data["decisions"]["worst"]
    ]


@click.command()
@click.argument("compiled", type=click.Path(exists=True, path_type=Path))
@click.argument("measured", type=click.Path(exists=True, path_type=Path))
@click.option("-o", "out", type=click.Path(path_type=Path), default=Path("docs/xla-cost-model.json"))
def main(compiled: Path, measured: Path, out: Path) -> None:
    """Write the sums of estimates beside measured times."""
    found = document(open_source(compiled), open_source(measured))
    atomic_write.write(out, (json.dumps(found, indent=1) + "\n").encode())
    for line in found["estimates"]:
        print({key: round(value, 3) if isinstance(value, float) else value for key, value in line.items()})
    print({key: value for key, value in found["decisions"].items() if key != "worst"})


if __name__ == "__main__":
    main()
