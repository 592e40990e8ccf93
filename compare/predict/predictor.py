"""Predicted times of kernels: the roofline time over an efficiency that trees, fitted to measured kernels, give."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import targets
from ..graph.analyse.roofline import Ceilings
from ..graph.model import FusionGraph
from .features import FAMILIES, KINDS, NAMES, Device, Row, rows
from .trees import Trees

FILE = "predictor.npz"
FITTED_ON = "h200"  # the target whose measured kernels the trees are fitted to
VALIDATED_ON = ("h200", "h100")
MODELS = ("products", "attention", "streams")
WORST_ERROR = 0.4  # a class of kernels with a larger validated error has no prediction
_CHUNK = 512  # rows, whose nodes fit in a cache
SMALL_US = 10.0  # per launch; below, the intervals are those of short kernels


@dataclass(frozen=True)
class Prediction:
    """The predicted time of a call's launches, and an interval that holds it in four of five cases.

    base_us: roofline time and launches, of which the time is a multiple.
    """

    time_us: float
    low_us: float
    high_us: float
    base_us: float


@dataclass(frozen=True)
class Unknown:
    """A kernel without a prediction."""

    reason: str


@dataclass(frozen=True)
class Calibration:
    """The validated error of a class of kernels, and the interval's ends in units of the predicted spread."""

    kernels: int
    error: float
    low: float
    high: float


@dataclass(frozen=True)
class Predictor:
    """Fitted trees, by the names in MODELS.

    medians: of each feature, against which `why` compares. classes: calibrations by the names that `levels` gives.
    """

    medians: NDArray[np.float32]
    efficiency: Mapping[str, Trees]
    spread: Mapping[str, Trees]
    classes: Mapping[str, Calibration]

    @classmethod
    def read(cls, path: Path) -> Predictor:
        with np.load(path) as file:
            arrays = dict(file)
        about: dict[str, Any] = json.loads(str(arrays["about"]))
        if tuple(about["names"]) != NAMES:
            raise ValueError(f"{path} was fitted to other features; python -m tools.fit_predictor fits it again")
        return cls(
            arrays["medians"],
            {name: Trees.of(arrays, name) for name in MODELS},
            {name: Trees.of(arrays, f"spread.{name}") for name in MODELS},
            {name: Calibration(*values) for name, values in about["classes"].items()},
        )

    def write(self, path: Path) -> None:
        """Write the file that `read` reads."""
        arrays: dict[str, NDArray[Any]] = {"medians": self.medians}
        for name in MODELS:
            arrays |= self.efficiency[name].arrays(name) | self.spread[name].arrays(f"spread.{name}")
        classes = {
            name: [c.kernels, round(c.error, 4), round(c.low, 4), round(c.high, 4)] for name, c in self.classes.items()
        }
        about = np.array(json.dumps({"names": NAMES, "classes": classes}))
        np.savez_compressed(path, about=about, **arrays)  # type: ignore[arg-type]

    def log_efficiency(self, matrix: NDArray[np.float32]) -> NDArray[np.float64]:
        """Return the logarithm of time over `base_us` for each row of features."""
        return self._by_model(self.efficiency, matrix)

    def log_spread(self, matrix: NDArray[np.float32]) -> NDArray[np.float64]:
        return self._by_model(self.spread, matrix)

    def _by_model(self, trees: Mapping[str, Trees], matrix: NDArray[np.float32]) -> NDArray[np.float64]:
        result = np.zeros(len(matrix))
        models = models_of(matrix)
        for name in set(models):
            chosen = np.flatnonzero(models == name)
            for at in range(0, len(chosen), _CHUNK):
                result[chosen[at : at + _CHUNK]] = trees[name](matrix[chosen[at : at + _CHUNK]])
        return result

    def _column(self, matrix: NDArray[np.float32], name: str) -> list[float]:
        return [float(value) for value in matrix[:, NAMES.index(name)]]

    def levels(self, matrix: NDArray[np.float32], times: NDArray[np.float64]) -> list[tuple[str, ...]]:
        """Return the names of each kernel's classes, the narrowest first."""
        columns = (self._column(matrix, f"size {name}") for name in ("kind", "work", "family", "launches"))
        return [
            _levels(kind, work, family, str(model), time / 2.0**launches < SMALL_US)
            for kind, work, family, launches, time, model in zip(*columns, times, models_of(matrix), strict=True)
        ]

    def predict(self, matrix: NDArray[np.float32], base_us: NDArray[np.float64]) -> list[Prediction | Unknown]:
        if not len(matrix):
            return []
        _, first, same = np.unique(matrix.view(np.uint32), axis=0, return_index=True, return_inverse=True)
        different = matrix[first]
        times = base_us * np.exp(self.log_efficiency(different)[same.ravel()])
        scales = np.exp(self.log_spread(different)[same.ravel()])
        found: list[Prediction | Unknown] = []
        for time, scale, base, names in zip(times, scales, base_us, self.levels(matrix, times), strict=True):
            name = next((name for name in names if name in self.classes), "")
            chosen = self.classes.get(name)
            if chosen is None or chosen.error > WORST_ERROR:
                problem = "too few were measured" if chosen is None else f"validated error {chosen.error:.0%}"
                found.append(Unknown(f"{name or names[0]}: {problem}"))
            else:
                low, high = time * math.exp(chosen.low * scale), time * math.exp(chosen.high * scale)
                found.append(Prediction(float(time), float(low), float(high), float(base)))
        return found


def models_of(matrix: NDArray[np.float32]) -> NDArray[np.str_]:
    """Return for each kernel the name in MODELS of its trees. Memory bounds an attention of few queries: a stream."""
    work, bound = (matrix[:, NAMES.index(f"size {name}")] for name in ("work", "compute over memory"))
    others = np.where((work == KINDS.index("attention")) & (bound >= 0), "attention", "streams")
    return np.where(work == KINDS.index("gemm"), "products", others)


@cache
def _levels(kind: float, work: float, family: float, model: str, short: bool) -> tuple[str, ...]:
    size, kind_name, work_name = "short " if short else "", KINDS[int(kind)], KINDS[int(work)]
    described = f"{kind_name} {work_name}" if kind_name == "custom" and work_name != kind_name else kind_name
    narrowest = "" if math.isnan(family) else f"{size}{described} by {FAMILIES[int(family)]}"
    wider = kind_name if kind_name == "collective" else model  # no other kind's error is that of an exchange
    return tuple(dict.fromkeys((narrowest, size + described, size + kind_name, size + wider)))


@cache
def shipped() -> Predictor:
    """Return the predictor of the target pack."""
    return Predictor.read(targets.FOLDER / FITTED_ON / FILE)


def device_of(graph: FusionGraph, ceilings: Ceilings) -> Device | None:
    """Return the device that a graph was compiled for, with these rates; None where no fit holds for it.

    The trees are fitted to one Hopper GPU, and validated on the other one.
    """
    target = targets.of_device(graph.target)
    return Device(ceilings).sized(target) if target in VALIDATED_ON else None


def predicted(graph: FusionGraph, device: Device) -> list[Prediction | Unknown]:
    """Return for each kernel in launch order its predicted time on a device, or why there is none."""
    found = list(rows(graph, device))
    known = [row for row in found if isinstance(row, Row)]
    predictor = shipped()
    matrix, base_us = np.array([row.values for row in known], np.float32), np.array([row.base_us for row in known])
    times = iter(predictor.predict(matrix, base_us))
    return [Unknown(row) if isinstance(row, str) else next(times) for row in found]


_GROUPS = ("access", "rows", "operations", "tile", "launch", "l2")


def why(graph: FusionGraph, index: int, device: Device) -> list[str]:
    """Return what drives the prediction for a kernel, in words, what matters most first.

    Each percentage is the change of the predicted time against the same kernel with that group of numbers as in the
    median kernel. A group of which the graph tells nothing is left out.
    """
    row = list(rows(graph, device))[index]
    if isinstance(row, str):
        return [row]
    predictor = shipped()
    matrix = np.repeat(np.array([row.values], np.float32), len(_GROUPS) + 1, axis=0)
    for at, group in enumerate(_GROUPS, 1):
        columns = [column for column, name in enumerate(NAMES) if name.partition(" ")[0] == group]
        matrix[at, columns] = predictor.medians[columns]
    logs = predictor.log_efficiency(matrix)
    effects = sorted(zip(logs[0] - logs[1:], _GROUPS, strict=True), key=lambda pair: -abs(pair[0]))
    said = [f"roofline time and launch: {row.base_us:.3g} us; predicted {math.exp(logs[0]):.2f} times that"]
    for effect, group in effects:
        facts = "; ".join(_facts(dict(zip(NAMES, row.values, strict=True)), group))
        if facts and abs(effect) >= 0.03:
            said.append(f"{group.upper() if group == 'l2' else group}: {facts} ({math.expm1(effect):+.0%})")
    return said


def _facts(values: Mapping[str, float], group: str) -> list[str]:
    """Return a group's numbers in words."""
    found = []
    if group == "access":
        for name in ("transposed", "strided", "broadcast", "gathered"):
            if values[f"access {name}"] > 0.005:
                found.append(f"{name}: {values[f'access {name}']:.0%} of the stream")
    elif group == "rows" and values["rows length in"] == values["rows length in"]:
        found.append(f"rows of {2 ** values['rows length in'] - 1:.0f} bytes read")
        if abs(values["rows in over out"]) > 0.5:
            found.append(f"reads {2 ** values['rows in over out']:.3g} elements for each that it writes")
    elif group == "operations":
        found = [
            f"{values[name]:.0f} {name.partition(' ')[2]}" for name in values
            if name.startswith("operations ") and "compiled" not in name and "fusion" not in name and values[name] > 0
        ]
    elif group == "tile" and values["tile rows"] == values["tile rows"]:
        found.append(f"{2 ** values['tile rows'] - 1:.0f} x {2 ** values['tile columns'] - 1:.0f}")
        if values["tile waves"] == values["tile waves"]:
            found.append(f"{values['tile waves']:.1f} waves of tiles")
    elif group == "launch" and values["launch waves"] == values["launch waves"]:
        found += [f"{values['launch waves']:.1f} waves", f"{values['launch occupancy']:.0%} occupancy"]
        if values["launch spilled"] > 0:
            found.append("spilled registers")
    elif group == "l2" and values["l2 used"] > 0:
        found.append(f"{values['l2 used']:.0%} of the reads may be in L2")
    return found
