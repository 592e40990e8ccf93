"""The tables of docs/predicted-times.md, from the files that `python -m tools.fit_predictor` wrote.

The captured steps are predicted by the predictor of the target pack, from the compilers' files alone.
"""

from __future__ import annotations

import json
import tarfile
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

from xlafuse.compare import targets
from xlafuse.compare.base.paths import PROJECT
from xlafuse.compare.base.text import number
from xlafuse.compare.graph.analyse.call_time import LAUNCHES, known_call_time
from xlafuse.compare.graph.model import FusionGraph
from xlafuse.compare.predict.predictor import FITTED_ON, WORST_ERROR, shipped
from xlafuse.compare.predict.times import with_predictions
from xlafuse.compare.profiles.steps import ProfiledStep, device_seconds
from xlafuse.compare.sources.opening import open_source
from xlafuse.compare.sources.target_ceilings import target_ceilings

CAPTURES = PROJECT / "tests" / "data" / "captures"

HEADERS = {
    "summary": ["validation", "kernels", "median", "by time", "predicted", "in interval", "calls", "median of calls",
                "nine of ten calls", "within 20%"],
    "group": ["", "kernels", "time, ms", "median", "by time", "roofline's median", "predicted", "in interval"],
    "worst": ["kernel", "kind", "measured, µs", "predicted, µs", "roofline, µs"],
    "unknown": ["kernels", "measured", "median error"],
    "choices": ["block", "programs", "with cuBLAS", "products", "right", "right, by time", "calls", "median error",
                "within 20%"],
    "calls": ["compiler", "calls", "gap, µs", "launch to launch, µs", "within 20%: sum", "with launches",
              "median error: sum", "with launches"],
    "steps": ["step", "kernels", "unknown", "on the device, ms", "in its kernels, ms", "predicted, ms", "interval, ms",
              "gaps, ms", "error", "error of its kernels", "misses most"],
}
_CAPTURED = {"nnx": "xla", "nnx_cudnn": "xla", "gpt": "torch_trace"}  # the folder of the compiler's files
_SPLITS = {
    "blocks": "whole blocks left out",
    "blocks, as compiled": "the same, without what only a GPU tells",
    "unseen blocks": "the same, blocks left out when tree shapes were chosen",
    "published shapes": "published attention shapes, which no fit sees", "compilers": "whole compilers left out",
    "to other GPU": "fitted on the H200, the H100's kernels",
    "from other GPU": "fitted on the H100, the H200's kernels",
}


@cache
def validation() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((targets.FOLDER / FITTED_ON / "predictor.json").read_text())
    return found


def summary() -> list[list[str]]:
    lines = []
    for name, words in _SPLITS.items():
        found, calls = validation()[name]["all"], validation()[name]["calls"]
        lines.append([
            words, str(found["kernels"]), *_errors(found), _percent(found["time_predicted"]),
            _percent(found["coverage"]), str(calls["calls"]), *map(_percent, (
                calls["median"], calls["ninth_of_ten"], calls["within_20"],
            )),
        ])
    return lines


def by(group: str, split: str = "blocks") -> list[list[str]]:
    """Return a line for each kind, compiler or size of kernels."""
    return [
        [
            name, str(found["kernels"]), number(found["time_ms"]), *_errors(found), _percent(found["roofline_median"]),
            _percent(found["time_predicted"]), _percent(found["coverage"]),
        ]
        for name, found in sorted(validation()[split][group].items(), key=lambda item: -item[1]["time_ms"])
    ]


def worst() -> list[list[str]]:
    return [
        [
            f"`{each['name'][:90]}`", each["kind"],
            *(number(each[f"{time}_us"]) for time in ("time", "predicted", "roofline")),
        ]
        for each in validation()["blocks"]["worst"]
    ]


def unknown() -> list[list[str]]:
    """Return the classes of kernels without a prediction."""
    return [
        [name, str(found.kernels), _percent(found.error)]
        for name, found in sorted(shipped().classes.items()) if found.error > WORST_ERROR
    ]


@dataclass(frozen=True)
class Captured:
    """A captured step. ran: its graph with measured times. compiled: the graph of the compiler's files alone."""

    steps: Sequence[ProfiledStep]
    ran: FusionGraph
    compiled: FusionGraph


@cache
def captured() -> dict[str, Captured]:
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, files in _CAPTURED.items():
            with tarfile.open(CAPTURES / f"{name}.tar.xz") as packed:
                packed.extractall(folder, filter="data")
            source, compiled = open_source(Path(folder) / name), open_source(Path(folder) / name / files)
            if source.profile is None:
                raise ValueError(f"{name}: expected the profile of a step")
            found[name] = Captured(source.profile.steps, source.results[0].load(), compiled.results[0].load())
    return found


def steps() -> list[list[str]]:
    """Return a line for each captured step; its times serve only the comparison."""
    return [_step(name, found) for name, found in captured().items()]


def _step(name: str, step: Captured) -> list[str]:
    graph, kernels = with_predictions(step.compiled, target_ceilings(FITTED_ON), FITTED_ON), step.ran.kernels or ()
    found, unknown = known_call_time(graph)
    measured = median(device_seconds(each.events) * 1e6 for each in step.steps)
    in_kernels = sum(kernel.device_time_us or 0 for kernel in kernels)
    missed, guessed = defaultdict[str, float](float), 0.0
    for kernel, guess in zip(kernels, graph.kernels or (), strict=True):
        missed[kernel.kind] += (guess.predicted_us or 0.0) - (kernel.device_time_us or 0)
        guessed += guess.predicted_us or 0.0
    kind = max(missed, key=lambda each: abs(missed[each]))
    time, low, high = (end or 0.0 for end in (found.us, found.low_us, found.high_us))
    return [
        f"`{name}`", str(len(kernels)), str(unknown), *(f"{each / 1e3:.1f}" for each in (measured, in_kernels, time)),
        f"{low / 1e3:.1f} to {high / 1e3:.1f}", f"{(time - guessed) / 1e3:.1f}", f"{time / measured - 1:+.1%}",
        f"{guessed / in_kernels - 1:+.1%}", f"{kind}: {missed[kind] / 1e3:+.1f} ms",
    ]


def choices() -> list[list[str]]:
    """Return a line for all programs and for each block."""
    found = json.loads((targets.FOLDER / FITTED_ON / "choices.json").read_text())
    return [
        [
            name, str(line["programs"]), str(line["cublas"]), str(line["products"]), _percent(line["right"]),
            _percent(line["right_by_time"]), str(line["calls"]), _percent(line["call_error"]),
            _percent(line["calls_within_20_percent"]),
        ]
        for name, line in (("all", found["all"]), *found["blocks"].items())
    ]


def call_lines() -> list[list[str]]:
    """Return a line for each compiler: its measured calls by their kernels' measured times, and by the gaps as well."""
    found = json.loads((targets.FOLDER / FITTED_ON / LAUNCHES).read_text())
    return [
        [
            compiler, str(calls["calls"]), number(found["gap_us"]), number(found["interval_us"][compiler]),
            *(_percent(calls[model][score]) for score in ("within_20", "median") for model in ("sum", "launches")),
        ]
        for compiler, calls in sorted(found["calls"].items(), key=lambda item: -item[1]["calls"])
    ]


def _errors(found: dict[str, Any]) -> list[str]:
    return [_percent(found["median"]), _percent(found["by_time"])]


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"
