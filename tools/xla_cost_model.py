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
from xlafuse.compare.graph.analyse.missed_fusions import ranked
from xlafuse.compare.graph.analyse.summary import fingerprint
from xlafuse.compare.graph.model import FusionGraph, Kernel
from xlafuse.compare.graph.operations import kind_by_operations
from xlafuse.compare.sources.opening import open_source
from xlafuse.compare.sources.source import Source
from xlafuse.compare.sources.target_ceilings import target_ceilings

LEAST_US = 5.0  # of a launch: below, the launch itself decides
PLACEHOLDER_US = 0.01  # the estimate of a model that has none
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
    def emitter(self) -> str:
        """The generator of the kernel's code."""
        if self.kernel.facts.get("opcode") == "custom-call":
            return "libraries"
        return "Triton" if self.kernel.facts.get("fusion_kind") == "kCustom" else "XLA's own emitters"

    @property
    def kind(self) -> str:
        return kind_by_operations(self.kernel)

    @property
    def size(self) -> str:
        return next(name for least, name in reversed(SIZES) if self.measured_us >= least)


@dataclass(frozen=True)
class Decision:
    """A kernel that XLA did not fuse into its consumers, because it expected that to be slower.

    measured_us: of all these kernels in a call. saving_us: the price of these missed fusions, by bytes and launches, in
    all `layers` that have the same decision.
    """

    record: str
    producer: str
    consumers: tuple[str, ...]
    fused_us: float
    unfused_us: float
    measured_us: float
    saving_us: float
    layers: int = 1

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
                if us == PLACEHOLDER_US:
                    continue
                found.setdefault((record.partition("/")[0], work, model), Estimate(record, kernel, model, us, each_us))
    return list(found.values())


def decisions(records: Iterable[tuple[str, FusionGraph, dict[int, float]]], target: str) -> list[Decision]:
    """Return the producers that XLA expected to be slower within their consumers, where all kernels were measured."""
    found = []
    for record, graph, times in records:
        prices: dict[tuple[str, str], float] = {}
        for one in ranked(graph, target_ceilings(target)):
            prices[one.reason.producer, one.reason.consumer] = one.price.us or 0.0
        pairs: dict[tuple[str, float, float], list[str]] = defaultdict(list)
        for reason in graph.reasons:
            if reason.fused_us is not None and reason.unfused_us:
                pairs[reason.producer, reason.fused_us, reason.unfused_us].append(reason.consumer)
        for (producer, fused_us, unfused_us), consumers in pairs.items():
            indices = [graph.named.get(name, ()) for name in (producer, *consumers)]
            measured = [times.get(own[0]) if len(own) == 1 else None for own in indices]
            if all(measured):
                total = sum(time or 0.0 for time in measured)
                saving = sum(prices.get((producer, consumer), 0.0) for consumer in consumers)
                found.append(Decision(record, producer, tuple(consumers), fused_us, unfused_us, total, saving))
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


def document(compiled: Source, measured: Source, target: str) -> dict[str, Any]:
    """Return all sums: by model, by model and kind, by model and size, and the decisions that cost most."""
    records = list(joined(compiled, measured))
    found, decided = estimates(records), decisions(records, target)
    groups: dict[str, dict[tuple[str, str], list[Estimate]]] = {"": defaultdict(list)}
    groups |= {name: defaultdict(list) for name in ("emitter", "kind", "size")}
    for one in found:
        groups[""][one.model, ""].append(one)
        groups["emitter"][one.model, one.emitter].append(one)
        groups["kind"][one.model, one.kind].append(one)
        groups["size"][one.model, one.size].append(one)
    costly = sorted(_of_all_layers(decided), key=lambda one: -one.saving_us)
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
            "costly": [{**one.__dict__, "ratio": one.ratio} for one in costly[:MOST_DECISIONS]],
        },
    }


def _of_all_layers(decided: Iterable[Decision]) -> list[Decision]:
    """Return the decisions with those of one record and the same estimates as one, with the sum of their times."""
    alike: dict[tuple[str, float, float], list[Decision]] = defaultdict(list)
    for one in decided:
        alike[one.record, round(one.fused_us, 2), round(one.unfused_us, 2)].append(one)
    return [
        replace(
            same[0], layers=len(same), measured_us=sum(one.measured_us for one in same) / len(same),
            saving_us=sum(one.saving_us for one in same),
        )
        for same in alike.values()
    ]


def _versions(source: Source) -> dict[str, str]:
    return next((dict(result.graph.versions) for result in source.results if result.graph is not None), {})


HEADERS = ["model", "kernels", "median error", "error by time", "median estimate / measured", "10% to 90%"]
DECISION_HEADERS = [
    "record", "producer → consumers", "XLA: fused µs", "XLA: apart µs", "measured apart µs", "XLA / measured",
    "price of the fusion µs",
]


def lines(data: Mapping[str, Any], by: str) -> list[list[str]]:
    """Return a line of a table for each model, or each model and group. by: "", "kind" or "size"."""
    return [
        [
            f"`{line['model']}`" + (f", {line['group']}" if by else ""), str(line["kernels"]),
            f"{line['median_error']:.0%}", f"{line['by_time']:.0%}" if line["by_time"] < 10 else "over 1000%",
            number(line["median_ratio"]),
            f"{number(line['low'])} to {number(line['high'])}",
        ]
        for line in data["estimates"] if line["by"] == by
    ]


def decision_lines(data: Mapping[str, Any]) -> list[list[str]]:
    """Return a line for each of the decisions that cost most."""
    return [
        [
            one["record"].removesuffix("/xla"), _names(one),
            *(number(one[name]) for name in ("fused_us", "unfused_us", "measured_us", "ratio", "saving_us")),
        ]
        for one in data["decisions"]["costly"]
    ]


def _names(decision: Mapping[str, Any]) -> str:
    times = f" in {decision['layers']} layers" if decision["layers"] > 1 else ""
    return f"`{decision['producer']}` → `{'`, `'.join(decision['consumers'])}`{times}"


@click.command()
@click.argument("compiled", type=click.Path(exists=True, path_type=Path))
@click.argument("measured", type=click.Path(exists=True, path_type=Path))
@click.option("-o", "out", type=click.Path(path_type=Path), default=Path("docs/xla-cost-model.json"))
@click.option("--target", default="h200", help="the GPU of both runs, which prices missed fusions")
def main(compiled: Path, measured: Path, out: Path, target: str) -> None:
    """Write the sums of estimates beside measured times."""
    found = document(open_source(compiled), open_source(measured), target)
    atomic_write.write(out, (json.dumps(found, indent=1) + "\n").encode())
    for line in found["estimates"]:
        print({key: round(value, 3) if isinstance(value, float) else value for key, value in line.items()})
    print({key: value for key, value in found["decisions"].items() if key != "costly"})


if __name__ == "__main__":
    main()
