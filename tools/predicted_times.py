"""The tables of docs/predicted-times.md, from the validation that `python -m tools.fit_predictor` wrote."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from xlafuse.compare import targets
from xlafuse.compare.base.text import number
from xlafuse.compare.predict.predictor import FITTED_ON, WORST_ERROR, shipped

HEADERS = {
    "summary": ["validation", "kernels", "median", "by time", "predicted", "in interval", "calls", "median of calls",
                "nine of ten calls", "within 20%"],
    "group": ["", "kernels", "time, ms", "median", "by time", "roofline's median", "predicted", "in interval"],
    "worst": ["kernel", "kind", "measured, µs", "predicted, µs", "roofline, µs"],
    "unknown": ["kernels", "measured", "median error"],
}
_SPLITS = {
    "blocks": "whole blocks left out", "blocks, newest run": "the same, kernels whose graph tells strides and launch",
    "blocks, as compiled": "the same, without what only a GPU tells",
    "unseen blocks": "the same, blocks left out when tree shapes were chosen", "compilers": "whole compilers left out",
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


def _errors(found: dict[str, Any]) -> list[str]:
    return [_percent(found["median"]), _percent(found["by_time"])]


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"
