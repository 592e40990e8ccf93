"""How right predicted choices of products are: `python -m tools.predicted_choices RUN --graphs FOLDER --out FILE.json`.

RUN is a run on an H200. For each of its XLA programs with products that autotuning chose, both kinds of kernels are
compiled without a GPU and without recorded choices. The kind with the shorter predicted time is chosen, by a predictor
that is fitted without the program's block. FOLDER keeps the compiled graphs, so a second call does not compile them
again. The program needs the Python of XLA's worker, and LightGBM there (`pip install lightgbm`).
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

from tools.fit_predictor import FOLDS, PROCESSES, Samples, fit, folds, read, results_of
from xlafuse.compare.graph import store
from xlafuse.compare.graph.analyse.call_time import call_time, known_call_time
from xlafuse.compare.graph.model import FusionGraph, Kernel
from xlafuse.compare.graph.operations import is_product
from xlafuse.compare.predict import predictor
from xlafuse.compare.predict.times import with_predictions
from xlafuse.compare.sources.result import Result
from xlafuse.compare.sources.target_ceilings import target_ceilings

TARGET = "h200"
KINDS = ("cublas", "triton")


@dataclass(frozen=True)
class Program:
    """recorded: the graph that ran; its call took call_us. compiled: without a record, by kind of products."""

    id: str
    block: str
    recorded: FusionGraph
    call_us: float
    compiled: Mapping[str, FusionGraph]


def _kind(kernel: Kernel) -> str:
    return "cublas" if "cublas" in kernel.facts.get("custom_call_target", "") else "triton"


def _products(graph: FusionGraph) -> list[Kernel]:
    """Return the products that autotuning chose, with a time."""
    return [k for k in graph.kernels or () if is_product(k) and k.facts.get("tunable") and k.device_time_us]


def programs(results: Iterable[Result], folder: Path) -> Iterable[Program]:
    """Yield the XLA programs with such products, compiled for the target. Each graph is a file of `folder`."""
    for result in results:
        record, graph = result.record, result.graph
        if record is None or graph is None or record.implementation not in ("xla", "xla-remat"):
            continue
        if record.status == "ok" and _products(graph):
            compiled = {}
            for kind in KINDS:
                path = folder / f"{result.id.replace('/', '_')}-{kind}.json.gz"
                if not path.exists():
                    store.save(_compiled(result, kind), path)
                compiled[kind] = store.load(path)
            yield Program(result.id, record.case.block, graph, result.row.device_time_us or 0.0, compiled)


def _compiled(result: Result, kind: str) -> FusionGraph:
    from xlafuse.compare.spec.blocks import BLOCKS
    from xlafuse.compare.workers.xla.prepare import compile_for_target
    from xlafuse.compare.workers.xla.target import xla_target

    record = result.record
    assert record is not None
    (row,) = (i for i in BLOCKS[record.case.block].implementations if i.name == record.implementation)

    def time_us(text: str) -> float:
        return float(("__cublas" in text) != (kind == "cublas"))

    device = replace(xla_target(TARGET), autotune_results=None, time_us=time_us)
    with tempfile.TemporaryDirectory() as dumps:
        print(f"{result.id}: {kind}", flush=True)
        return compile_for_target(record.case, row, TARGET, Path(dumps), device)[1]


def evaluated(samples: Samples, found: Sequence[Program]) -> dict[str, Any]:
    """Return the table of blocks, and the sums over all, of choices by predictors that did not see the block."""
    masks = folds(samples.block, FOLDS)
    lines = []
    with ProcessPoolExecutor(PROCESSES) as pool:
        for mask, fitted in zip(masks, pool.map(partial(_without, samples), masks), strict=True):
            left_out = set(samples.block[mask])
            with patch.object(predictor, "shipped", lambda fitted=fitted: fitted):
                lines += [_evaluated(program) for program in found if program.block in left_out]
    blocks = defaultdict[str, list[dict[str, Any]]](list)
    for line in lines:
        blocks[line["block"]].append(line)
    return {"all": _sums(lines), "blocks": {name: _sums(members) for name, members in sorted(blocks.items())}}


def _without(samples: Samples, mask: Any) -> predictor.Predictor:
    return fit(samples[~mask])


def _evaluated(program: Program) -> dict[str, Any]:
    ceilings = target_ceilings(TARGET)
    graphs = {kind: with_predictions(graph, ceilings) for kind, graph in program.compiled.items()}
    times = [known_call_time(graphs[kind])[0].us for kind in KINDS]
    _, chosen = min((math.inf if time is None else time, kind) for time, kind in zip(times, KINDS, strict=True))
    products = _products(program.recorded)
    right = [kernel for kernel in products if _kind(kernel) == chosen]
    call_us = call_time(graphs[chosen]).us
    return {
        "block": program.block, "chosen": chosen, "products": len(products), "right": len(right),
        "us": sum(kernel.device_time_us or 0.0 for kernel in products),
        "right_us": sum(kernel.device_time_us or 0.0 for kernel in right),
        "error": None if call_us is None else call_us / program.call_us - 1,
    }


def _sums(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    sums = {name: sum(line[name] for line in lines) for name in ("products", "right", "us", "right_us")}
    errors = [abs(line["error"]) for line in lines if line["error"] is not None]
    return {
        "programs": len(lines), "cublas": sum(line["chosen"] == "cublas" for line in lines),
        "products": sums["products"], "right": sums["right"] / sums["products"],
        "right_by_time": sums["right_us"] / sums["us"], "calls": len(errors),
        "call_error": median(errors) if errors else None,
        "calls_within_20_percent": sum(error <= 0.2 for error in errors) / len(errors) if errors else None,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--fit", nargs="*", type=Path, default=[], help="further runs to fit to")
    parser.add_argument("--graphs", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    chosen = parser.parse_args(arguments)
    chosen.graphs.mkdir(parents=True, exist_ok=True)

    from xlafuse.compile.environment import configure_environment

    configure_environment(deviceless=True)
    found = list(programs(results_of(chosen.run), chosen.graphs))
    report = evaluated(read([*chosen.fit, chosen.run], TARGET), found)
    chosen.out.write_text(json.dumps(report, indent=1) + "\n")
    print(report["all"])


if __name__ == "__main__":
    main()
