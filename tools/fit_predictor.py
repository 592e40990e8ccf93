"""Fit and validate the predictor of kernel times: `python -m tools.fit_predictor RUN... [--other RUN]`.

RUN is a run on the GPU that the predictor is for, a folder or a packed one; of a record in several, the last RUN's
counts. --other is a run of the same programs on another GPU. The program needs LightGBM (`pip install lightgbm`). It
writes `predictor.npz`, `predictor.json` and `launches.json` to the target pack; docs/predicted-times.md shows what the
last two say of the errors.
Kernels of one block are never on both sides of a split: the kernels of a composite block resemble those of the simple
ones, but those of a block's cases are the same. No fit sees the shapes that others published; they are scored
apart.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import tarfile
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xlafuse.compare import targets
from xlafuse.compare.graph.analyse.call_time import LAUNCHES, span_us
from xlafuse.compare.graph.model import FusionGraph, Kernel, Launch
from xlafuse.compare.predict import predictor as predicting
from xlafuse.compare.predict.features import KINDS, NAMES, Device, Row, rows
from xlafuse.compare.predict.predictor import MODELS, SMALL_US, Calibration, Prediction, Predictor, models_of
from xlafuse.compare.predict.trees import Trees
from xlafuse.compare.sources.opening import open_source
from xlafuse.compare.sources.result import Result

JSON = "predictor.json"
MANY_LAUNCHES = 20  # of a call whose gaps count
INTERVALS_US = (0.0, *(float(time) for time in range(40, 105, 5)))  # that Python may take from launch to launch
FOLDS, INNER_FOLDS = 8, 5
LEAST = 15  # distinct kernels of a class with its own calibration
PROCESSES = 2
PUBLISHED = "public-"  # begins the names of cases whose shapes others published
# Shapes were chosen by leaving out blocks among those that are not `unseen`.
COMMON = {
    "objective": "huber", "alpha": 0.2, "learning_rate": 0.1, "feature_fraction": 0.4, "bagging_fraction": 0.8,
    "bagging_freq": 1, "max_depth": 10, "verbose": -1, "max_bin": 127, "num_threads": 1, "seed": 1,
}
SHAPES: dict[str, dict[str, Any]] = {
    "products": {"num_iterations": 300, "num_leaves": 15, "min_data_in_leaf": 15, "extra_trees": True},
    "attention": {"num_iterations": 120, "num_leaves": 15, "min_data_in_leaf": 5, "extra_trees": True},
    "streams": {"num_iterations": 200, "num_leaves": 63, "min_data_in_leaf": 8},
}
SPREAD: dict[str, Any] = {"num_iterations": 60, "num_leaves": 8, "min_data_in_leaf": 30}
_DEVICES_OWN = re.compile(r"[._]")


@dataclass(frozen=True)
class Samples:
    """Measured kernels. key: equal for kernels that do the same in the same block. call: the record that holds it.

    compiled: what a compile without the GPU tells of the same kernels, in `matrix`'s columns.
    """

    matrix: NDArray[np.float32]
    compiled: NDArray[np.float32]
    base_us: NDArray[np.float64]
    time_us: NDArray[np.float64]
    launches: NDArray[np.float64]
    block: NDArray[Any]
    compiler: NDArray[Any]
    call: NDArray[Any]
    key: NDArray[np.int64]
    name: NDArray[Any]

    def __len__(self) -> int:
        return len(self.matrix)

    def __getitem__(self, chosen: NDArray[Any]) -> Samples:
        return Samples(**{name: values[chosen] for name, values in vars(self).items()})

    @property
    def kind(self) -> NDArray[Any]:
        return np.array([KINDS[int(kind)] for kind in self.matrix[:, NAMES.index("size kind")]])

    @property
    def long(self) -> NDArray[np.bool_]:
        return self.time_us / self.launches >= SMALL_US


def results_of(path: Path) -> Iterable[Result]:
    """Yield the results of a run's folder, or of one packed as tar."""
    if path.is_dir():
        yield from open_source(path).results
        return
    with tempfile.TemporaryDirectory() as folder, tarfile.open(path) as packed:
        packed.extractall(folder, filter="data")
        yield from open_source(next(Path(folder).rglob("run.json")).parent).results


def as_compiled(graph: FusionGraph) -> FusionGraph:
    """Return the graph without what only a device tells: the kernel that a library chose, and launches of it."""
    own = graph.compiler.partition("-")[0]
    return replace(graph, kernels=tuple(_as_compiled(kernel, own) for kernel in graph.kernels or ()))


def _as_compiled(kernel: Kernel, compiler: str) -> Kernel:
    name = kernel.runtime_name
    named = name is not None and (_DEVICES_OWN.sub("", kernel.name).endswith(_DEVICES_OWN.sub("", name)))
    facts = {fact: value for fact, value in kernel.facts.items() if fact != "with"}
    authored = compiler in ("triton", "cuda") and kernel.kind == "custom"
    launch = kernel.launch if authored else Launch(config=kernel.launch.config)
    return replace(kernel, runtime_name=name if named or authored else None, launch=launch, facts=facts)


def read(paths: Sequence[Path], target: str, limit: int | None = None, *, published: bool = False) -> Samples:
    """Return the measured kernels whose bytes and launches are known, each record from the last run that has it.

    published: those of published shapes, instead of all others.
    """
    columns = defaultdict[str, list[Any]](list)
    seen = set[str]()
    for path in reversed(paths):
        before = frozenset(seen)
        for result in islice(results_of(path), limit):
            graph, ceilings, record = result.graph, result.ceilings, result.record
            if graph is None or ceilings is None or record is None or record.status != "ok" or result.id in before:
                continue
            if record.case.name.startswith(PUBLISHED) != published:
                continue
            seen.add(result.id)
            device = Device(ceilings).sized(target)
            pairs = zip(rows(graph, device), rows(as_compiled(graph), device), graph.kernels or (), strict=True)
            for row, bare, kernel in pairs:
                if not isinstance(row, Row) or not isinstance(bare, Row) or not kernel.device_time_us:
                    continue
                values = {
                    "matrix": row.values, "compiled": bare.values, "base_us": row.base_us,
                    "time_us": kernel.device_time_us, "launches": float(kernel.launches or 1),
                    "block": record.case.block, "compiler": graph.compiler.partition("-")[0],
                    "call": f"{path.name} {result.id}", "key": _key(graph, kernel, record.case.block),
                    "name": f"{result.id}: {kernel.name}",
                }
                for name, value in values.items():
                    columns[name].append(value)
    types = {"matrix": np.float32, "compiled": np.float32, "base_us": np.float64, "time_us": np.float64,
             "launches": np.float64, "key": np.int64}
    return Samples(**{name: np.array(values, types.get(name)) for name, values in columns.items()})


def _key(graph: FusionGraph, kernel: Kernel, block: str) -> int:
    def sizes(side: Any) -> list[Any]:
        return sorted((a.bytes or 0, graph.buffer[a.buffer].dtype if a.buffer in graph.buffer else "") for a in side)

    name = re.sub(r"\d+$", "", kernel.runtime_name or kernel.name)
    work = (block, graph.compiler, kernel.kind, name, kernel.launches, kernel.flops)
    text = repr((work, sizes(kernel.inputs), sizes(kernel.outputs)))
    return int.from_bytes(hashlib.md5(text.encode()).digest()[:7], "big")


# Fitting


def boost(
    matrix: NDArray[np.float32], target: NDArray[np.float64], weight: NDArray[np.float64] | None, shape: dict[str, Any]
) -> Trees:
    import lightgbm

    if not len(target):  # no kernel of a sort: its time is the roofline's
        none, leaf = np.zeros(1, np.int16), np.full(1, -1, np.int16)
        return Trees(leaf, np.zeros(1, np.float32), none, none, np.ones(1, np.bool_), np.zeros(1, np.int32), 1)
    return exported(lightgbm.train(COMMON | shape, lightgbm.Dataset(matrix, target, weight=weight)))


def exported(model: Any) -> Trees:
    """Return a LightGBM model of numbers as arrays. A threshold is rounded down, so each float32 stays on its side."""
    nodes: list[list[Any]] = []
    roots, deepest = [], 1

    def add(node: dict[str, Any], root: int, depth: int) -> int:
        nonlocal deepest
        deepest, at = max(deepest, depth), len(nodes)
        nodes.append([])
        if "leaf_value" in node:
            nodes[at] = [-1, np.float32(node["leaf_value"]), 0, 0, True]
            return at - root
        exact = float(node["threshold"])
        limit = np.float32(min(exact, float(np.finfo(np.float32).max)))
        limit = np.nextafter(limit, np.float32(0 if limit > 0 else -np.inf)) if float(limit) > exact else limit
        missing_left = node["default_left"] if node["missing_type"] == "NaN" else exact >= 0
        nodes[at] = [node["split_feature"], limit, 0, 0, missing_left]
        nodes[at][2] = add(node["left_child"], root, depth + 1)
        nodes[at][3] = add(node["right_child"], root, depth + 1)
        return at - root

    for tree in model.dump_model()["tree_info"]:
        roots.append(len(nodes))
        add(tree["tree_structure"], len(nodes), 0)
    feature, threshold, left, right, missing_left = zip(*nodes, strict=True)
    return Trees(
        np.array(feature, np.int16), np.array(threshold, np.float32), np.array(left, np.int16),
        np.array(right, np.int16), np.array(missing_left), np.array(roots, np.int32), deepest,
    )


def fit(samples: Samples) -> Predictor:
    """Return a predictor with its intervals, which come from models that did not see the block of a kernel."""
    found, counts = representatives(samples)
    samples, weight = samples[found], counts**0.3
    predictor, left_out = _bare(samples, _efficiency(samples, weight)), folds(samples.block, INNER_FOLDS)
    error, scale = (np.full(len(samples), np.nan) for _ in range(2))
    for mask in left_out:
        trees = _efficiency(samples[~mask], weight[~mask])
        guess = _bare(samples, trees).log_efficiency(samples.matrix[mask])
        error[mask] = np.log(samples.time_us[mask] / samples.base_us[mask]) - guess
    for mask in left_out:  # a spread that saw an error would make its share of the interval too short
        spread = _spread(samples[~mask], error[~mask])
        scale[mask] = np.exp(replace(predictor, spread=spread).log_spread(samples.matrix[mask]))
    predictor = replace(predictor, spread=_spread(samples, error))
    return replace(predictor, classes=_classes(predictor, samples, error, scale))


def _spread(samples: Samples, error: NDArray[np.float64]) -> dict[str, Trees]:
    """Return trees for the logarithm of the error's size."""
    models, size = models_of(samples.matrix), np.log(np.abs(error) + 0.005)
    return {name: boost(samples.matrix[models == name], size[models == name], None, SPREAD) for name in MODELS}


def _bare(samples: Samples, efficiency: dict[str, Trees]) -> Predictor:
    return Predictor(_medians(samples.matrix), efficiency, efficiency, {})


def _medians(matrix: NDArray[np.float32]) -> NDArray[np.float32]:
    return np.array([np.median(known) if len(known := c[~np.isnan(c)]) else np.nan for c in matrix.T], np.float32)


def _efficiency(samples: Samples, weight: NDArray[np.float64]) -> dict[str, Trees]:
    """Return trees for the logarithm of time over base, from each kernel as it ran, as it was compiled, and as a graph
    of an earlier version tells it, which has no access patterns."""
    weight, target = weight * np.where(samples.long, 1.0, 0.25), np.log(samples.time_us / samples.base_us)
    found = {}
    for name in MODELS:
        chosen = np.flatnonzero(models_of(samples.matrix) == name)
        bare = chosen[(np.nan_to_num(samples.compiled) != np.nan_to_num(samples.matrix)).any(axis=1)[chosen]]
        earlier = samples.compiled[chosen]
        earlier[:, [i for i, column in enumerate(NAMES) if column.startswith("access ")]] = np.nan
        every = np.concatenate([chosen, bare, chosen])
        matrix = np.concatenate([samples.matrix[chosen], samples.compiled[bare], earlier])
        found[name] = boost(matrix, target[every], weight[every], SHAPES[name])
    return found


def representatives(samples: Samples) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return the index of a kernel of median time for each key and run, and the number of those that it stands for."""
    groups = defaultdict[tuple[int, str], list[int]](list)
    for index, (key, call) in enumerate(zip(samples.key, samples.call, strict=True)):
        groups[int(key), call.partition(" ")[0]].append(index)
    chosen = [sorted(each, key=lambda i: samples.time_us[i])[len(each) // 2] for each in groups.values()]
    return np.array(chosen), np.array([len(each) for each in groups.values()], float)


def folds(groups: NDArray[Any], count: int) -> list[NDArray[np.bool_]]:
    """Return masks that leave out whole groups, of about equal numbers of kernels."""
    names, sizes = np.unique(groups, return_counts=True)
    loads, members = [0] * count, defaultdict[int, list[str]](list)
    for at in np.argsort(-sizes, kind="stable"):
        least = int(np.argmin(loads))
        loads[least] += int(sizes[at])
        members[least].append(names[at])
    return [np.isin(groups, each) for each in members.values()]


def _classes(
    predictor: Predictor, samples: Samples, error: NDArray[np.float64], scale: NDArray[np.float64]
) -> dict[str, Calibration]:
    members = defaultdict[str, list[int]](list)
    for index, names in enumerate(predictor.levels(samples.matrix, samples.time_us * np.exp(-error))):
        for name in names:
            members[name].append(index)
    classes = {}
    for name, indices in members.items():
        if len(indices) >= LEAST and name:
            low, high = np.quantile(error[indices] / scale[indices], [0.1, 0.9])
            off = np.median(np.abs(np.expm1(-error[indices])))
            classes[name] = Calibration(len(indices), float(off), float(low), float(high))
    return classes


# Validation


@dataclass(frozen=True)
class Predicted:
    """Predictions for samples, in their order; NaN where a kernel is unknown."""

    samples: Samples
    time_us: NDArray[np.float64]
    low_us: NDArray[np.float64]
    high_us: NDArray[np.float64]


def predict(predictor: Predictor, samples: Samples, compiled: bool = False) -> NDArray[np.float64]:
    """Return time, low and high by kernel; NaN where it is unknown."""
    found = predictor.predict(samples.compiled if compiled else samples.matrix, samples.base_us)
    return np.array([
        (each.time_us, each.low_us, each.high_us) if isinstance(each, Prediction) else (np.nan,) * 3 for each in found
    ])


def leave_out(samples: Samples, left_out: Sequence[NDArray[np.bool_]]) -> tuple[Predicted, Predicted]:
    """Return predictions from what ran, and from what a compile tells, by models that saw neither."""
    ran, compiled = (np.full((len(samples), 3), np.nan) for _ in range(2))
    with ProcessPoolExecutor(PROCESSES) as pool:
        for mask, found in zip(left_out, pool.map(partial(_left_out, samples), left_out), strict=True):
            ran[mask], compiled[mask] = found
    return Predicted(samples, *ran.T), Predicted(samples, *compiled.T)


def _left_out(samples: Samples, mask: NDArray[np.bool_]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    predictor = fit(samples[~mask])
    return predict(predictor, samples[mask]), predict(predictor, samples[mask], compiled=True)


def distinct(predicted: Predicted) -> Predicted:
    """Return a kernel of median time for each key, with the median of the predictions, of at least 10 us a launch."""
    groups = defaultdict[int, list[int]](list)
    for index in np.flatnonzero(predicted.samples.long):
        groups[int(predicted.samples.key[index])].append(int(index))
    chosen = [sorted(each, key=lambda i: predicted.samples.time_us[i])[len(each) // 2] for each in groups.values()]
    values = (predicted.time_us, predicted.low_us, predicted.high_us)
    medians = [np.array([np.median(value[each]) for each in groups.values()]) for value in values]
    return Predicted(predicted.samples[np.array(chosen)], *medians)


def of(predicted: Predicted, chosen: NDArray[np.bool_]) -> Predicted:
    return Predicted(
        predicted.samples[chosen], predicted.time_us[chosen], predicted.low_us[chosen], predicted.high_us[chosen]
    )


def errors(predicted: Predicted) -> NDArray[np.float64]:
    """Return relative errors; a kernel without a prediction is 100% off."""
    off = np.abs(predicted.time_us / predicted.samples.time_us - 1)
    return np.where(np.isnan(off), 1.0, off)


def summary(predicted: Predicted, chosen: Any = slice(None)) -> dict[str, Any]:
    """Return the errors of chosen distinct kernels."""
    off, time = errors(predicted)[chosen], predicted.samples.time_us[chosen]
    low, high, known = predicted.low_us[chosen], predicted.high_us[chosen], ~np.isnan(predicted.time_us[chosen])
    roofline = np.abs(predicted.samples.base_us[chosen] / time - 1)
    return {
        "kernels": len(off), "median": _round(np.median(off)), "by_time": _round((off * time).sum() / time.sum()),
        "within_20": _round(np.mean(off <= 0.2)), "roofline_median": _round(np.median(roofline)),
        "time_predicted": _round(time[known].sum() / time.sum()), "time_ms": _round(time.sum() / 1e3),
        "coverage": _round(np.mean(((low <= time) & (time <= high))[known])) if known.any() else None,
    }


def by(predicted: Predicted, groups: NDArray[Any]) -> dict[str, Any]:
    return {str(name): summary(predicted, groups == name) for name in np.unique(groups)}


def calls(predicted: Predicted) -> dict[str, Any]:
    """Return the errors of whole calls: predictions and times summed up. A kernel without a prediction adds nothing."""
    measured, sums = defaultdict[str, float](float), defaultdict[str, float](float)
    for call, time, guess in zip(predicted.samples.call, predicted.samples.time_us, predicted.time_us, strict=True):
        measured[call] += time
        sums[call] += 0.0 if np.isnan(guess) else guess
    off = np.array([abs(sums[call] / time - 1) for call, time in measured.items() if time >= SMALL_US])
    return {
        "calls": len(off), "median": _round(np.median(off)), "ninth_of_ten": _round(np.quantile(off, 0.9)),
        "within_20": _round(np.mean(off <= 0.2)),
    }


def worst(predicted: Predicted, count: int = 10) -> list[dict[str, Any]]:
    """Return the predicted kernels that miss most time, one of a block and kernel name."""
    missed = np.nan_to_num(np.abs(predicted.time_us - predicted.samples.time_us))
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for index in np.argsort(-missed):
        name = str(predicted.samples.name[index])
        same = str(predicted.samples.block[index]), re.sub(r"\W?\d+$", "", name.partition(": ")[2])
        found.setdefault(same, {
            "name": name, "kind": str(predicted.samples.kind[index]),
            "time_us": _round(predicted.samples.time_us[index]), "predicted_us": _round(predicted.time_us[index]),
            "roofline_us": _round(predicted.samples.base_us[index]),
        })
        if len(found) == count:
            break
    return list(found.values())


def _sizes(predicted: Predicted) -> NDArray[Any]:
    edges = ("10 to 30 us", "30 to 100 us", "100 to 1000 us", "over 1000 us")
    per_launch = predicted.samples.time_us / predicted.samples.launches
    return np.array([edges[at] for at in np.searchsorted((30, 100, 1000), per_launch, side="right")])


def scores(predicted: Predicted) -> dict[str, Any]:
    """Return all tables of one validation."""
    found = distinct(predicted)
    return {
        "all": summary(found), "calls": calls(predicted), "kind": by(found, found.samples.kind),
        "compiler": by(found, found.samples.compiler), "size": by(found, _sizes(found)),
    }


def across(fitted: Predictor, samples: Samples) -> dict[str, Any]:
    return scores(Predicted(samples, *predict(fitted, samples).T))


def unseen(blocks: NDArray[Any]) -> NDArray[np.bool_]:
    """Return the kernels of blocks whose errors did not choose the shapes of trees."""
    return np.array([int(hashlib.md5(f"s{block}".encode()).hexdigest(), 16) % 3 == 0 for block in blocks])


def validate(samples: Samples, published: Samples, other: Samples | None) -> dict[str, Any]:
    ran, compiled = leave_out(samples, folds(samples.block, FOLDS))
    aside = unseen(samples.block)
    report: dict[str, Any] = {
        "blocks": scores(ran) | {"worst": worst(distinct(ran))}, "blocks, as compiled": scores(compiled),
        "unseen blocks": scores(of(ran, aside)),
    }
    compilers, _ = leave_out(samples, [samples.compiler == name for name in np.unique(samples.compiler)])
    report["compilers"] = scores(compilers)
    if len(published):
        report["published shapes"] = across(fit(samples), published)
    if other is not None:
        report["to other GPU"] = across(fit(samples), other)
        report["from other GPU"] = across(fit(other), samples)
    return report


# Calls


@dataclass(frozen=True)
class Call:
    """A measured call of several launches."""

    kernels: Sequence[Kernel]
    time_us: float

    @property
    def launches(self) -> int:
        return sum(kernel.certain_launches for kernel in self.kernels)

    @property
    def phases(self) -> int:
        return len({kernel.phase for kernel in self.kernels})

    def off(self, gap: float, interval: float) -> float:
        """Return the relative error of the call's time by its kernels' measured times and these gaps."""
        times = [kernel.device_time_us or 0.0 for kernel in self.kernels]
        return abs(span_us(self.kernels, times, gap, interval) / self.time_us - 1)


def calls_of(results: Iterable[Result]) -> dict[str, list[Call]]:
    """Return the calls of several launches by compiler, without those of which a kernel's time is unknown."""
    found = defaultdict[str, list[Call]](list)
    for result in results:
        graph, time = result.graph, result.time_us
        if graph is None or result.record is None or result.record.status != "ok" or not time:
            continue
        call = Call(graph.kernels or (), time)
        if call.launches > call.phases and all(each.device_time_us and each.launches for each in call.kernels):
            found[graph.compiler].append(call)
    return found


def launches(calls: Mapping[str, Sequence[Call]]) -> dict[str, Any]:
    """Return the gap within a CUDA graph, and the time from launch to launch by compiler that fits its calls best.

    The gap is the median of XLA's calls of many launches. The time from launch to launch puts most calls within 20%.
    """
    gap = float(np.median([
        (call.time_us - sum(kernel.device_time_us or 0.0 for kernel in call.kernels)) / (call.launches - call.phases)
        for call in calls["xla"] if call.launches >= MANY_LAUNCHES
    ]))
    report: dict[str, Any] = {"gap_us": _round(gap), "interval_us": {}, "calls": {}}
    for compiler, own in sorted(calls.items()):
        if len(own) < LEAST:
            continue

        def score(interval: float, gap: float = gap, own: Sequence[Call] = own) -> dict[str, float]:
            off = np.array([call.off(gap, interval) for call in own])
            return {"within_20": _round(np.mean(off <= 0.2)), "median": _round(np.median(off))}

        best = max(INTERVALS_US, key=lambda interval: score(interval)["within_20"])
        report["interval_us"][compiler] = best
        report["calls"][compiler] = {"calls": len(own), "sum": score(0.0, 0.0), "launches": score(best)}
    return report


def _round(value: Any) -> float:
    return float(f"{float(value):.4g}")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--other", type=Path, help="a run on another GPU")
    parser.add_argument("--other-target", default="h100")
    parser.add_argument("--target", default=predicting.FITTED_ON)
    parser.add_argument("--no-validation", action="store_true", help="fit only")
    chosen = parser.parse_args(arguments)
    samples = read(chosen.runs, chosen.target)
    folder = targets.FOLDER / chosen.target
    print(f"{len(samples)} kernels, {len(np.unique(samples.key))} distinct")
    fit(samples).write(folder / predicting.FILE)
    print(f"{folder / predicting.FILE}: {(folder / predicting.FILE).stat().st_size / 1e3:.0f} kB")
    found = launches(calls_of(result for path in chosen.runs for result in results_of(path)))
    (folder / LAUNCHES).write_text(json.dumps(found, indent=1) + "\n")
    if not chosen.no_validation:
        published = read(chosen.runs, chosen.target, published=True)
        other = None if chosen.other is None else read([chosen.other], chosen.other_target)
        report = validate(samples, published, other)
        report["runs"] = [path.name.partition(".")[0] for path in chosen.runs]
        (folder / JSON).write_text(json.dumps(report, indent=1) + "\n")
        for name, found in report.items():
            if isinstance(found, dict):
                print(f"{name}: kernels {found['all']}, calls {found['calls']}")


if __name__ == "__main__":
    main()
