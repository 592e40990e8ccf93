"""Differences between the environments of two runs: packages, GPU, driver, variables, timing options and ceilings."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

NOTABLE = 0.02  # relative; the ceilings of one machine vary by less from run to run
_FIRST = ("xlafuse", "target", "device", "driver", "jax", "jaxlib", "torch", "triton", "cuda")
_LAST = ("variable ", "timing ")
_COMPARED_BY_RECORD = ("timer",)
_NONE = "none recorded"


@dataclass(frozen=True)
class Difference:
    """A fact that differs. before, after: its values in run.json; those of several segments or workers are joined."""

    name: str
    before: str
    after: str


def differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[Difference]:
    """Return the differences between two run.json.

    Order: xlafuse, GPU, driver, frameworks, other packages and facts, variables, timing options, ceilings.
    """
    facts = _facts(a), _facts(b)
    names = sorted({*facts[0], *facts[1]}, key=lambda name: (_rank(name), name))
    found = []
    for name in names:
        before, after = (", ".join(side.get(name) or [_NONE]) for side in facts)
        if before != after:
            found.append(Difference(name, before, after))
    return [*found, *_ceilings(a, b)]


def _rank(name: str) -> int:
    if name in _FIRST:
        return _FIRST.index(name)
    return len(_FIRST) + 1 + next((i for i, kind in enumerate(_LAST) if name.startswith(kind)), -1)


def _facts(run: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the sorted distinct values by name, over all segments and workers; None counts as no value."""
    found: dict[str, set[str]] = {}
    for name, value in _named_values(run):
        if value is not None:
            found.setdefault(name, set()).add(str(value))
    return {name: sorted(values) for name, values in found.items()}


def _named_values(run: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name in ("xlafuse", "target"):
        yield name, run.get(name)
    for name, value in sorted(_object(_object(run.get("plan")).get("timing")).items()):
        yield f"timing {name}", value
    for segment in segments(run).values():
        environment = _object(segment.get("environment"))
        for name, value in _object(environment.get("host")).items():
            if isinstance(value, dict):
                for variable, text in value.items():
                    yield f"variable {variable}", text
            else:
                yield ("driver" if name == "nvidia_driver" else name), value
        for worker in _object(environment.get("workers")).values():
            for name, value in _object(worker).items():
                if name not in _COMPARED_BY_RECORD:
                    yield name, value


def _ceilings(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[Difference]:
    sides = _median_rates(segments(a).values()), _median_rates(segments(b).values())
    for name in sorted({*sides[0], *sides[1]}):
        before, after = (side.get(name) for side in sides)
        if before is not None and after is not None and abs(after / before - 1) <= NOTABLE:
            continue
        words = [_NONE if value is None else f"{value / 1e12:.4g} T{name[1]}/s" for value in (before, after)]
        yield Difference(f"ceiling: {name[0]}", words[0], words[1])


def _median_rates(found: Iterable[Mapping[str, Any]]) -> dict[tuple[str, str], float]:
    """Return the median rate per second over segments, by (name, unit)."""
    rates: dict[tuple[str, str], list[float]] = {}
    for segment in found:
        ceilings = _object(segment.get("ceilings"))
        for kind, unit, label_of in (
            ("streams", "B", "memory bandwidth, {} reads to writes"), ("products", "FLOP", "matrix product, {}"),
        ):
            for name, rate in _object(ceilings.get(kind)).items():
                if isinstance(rate, int | float) and rate > 0:
                    rates.setdefault((label_of.format(name), unit), []).append(float(rate))
    return {key: statistics.median(values) for key, values in rates.items()}


def segments(run: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return the segments of run.json by id, without those that are no objects."""
    listed = run.get("segments")
    found = [segment for segment in listed if isinstance(segment, dict)] if isinstance(listed, list) else []
    return {str(segment.get("id")): segment for segment in found}


def devices(segment: Mapping[str, Any]) -> set[str]:
    """Return the names of the GPUs that the workers of a segment used."""
    workers = _object(_object(segment.get("environment")).get("workers"))
    return {str(worker["device"]) for worker in workers.values() if isinstance(worker, dict) and worker.get("device")}


def ceiling_difference(a: Mapping[str, Any], b: Mapping[str, Any]) -> float:
    """Return the largest relative difference between the ceilings of two segments; 0 without a common ceiling."""
    before, after = _median_rates([a]), _median_rates([b])
    return max((abs(after[name] / before[name] - 1) for name in before.keys() & after.keys()), default=0.0)


def _object(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}
