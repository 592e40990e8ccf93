"""tools.benchmarks.missed_fusions: prices of forced missed fusions beside the time that fusing them saves."""

import json
import math
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from graph_builder import graph as made
from graph_builder import kernel

from tools.benchmarks.missed_fusions import inductor_cases
from tools.benchmarks.missed_fusions.case import difference
from tools.benchmarks.missed_fusions.measured import NotMeasured, read
from tools.benchmarks.missed_fusions.outcome import Outcome, outcome, summary, summary_of
from tools.benchmarks.missed_fusions.tables import PRICE, UNPREDICTED
from tools.benchmarks.missed_fusions.tables import read as read_forced
from xlafuse.compare.base.paths import PROJECT
from xlafuse.compare.graph import store
from xlafuse.compare.graph.analyse.missed_fusions import PRICE_ERRORS, Price, price_error, together
from xlafuse.compare.graph.model import FusionGraph, Reason
from xlafuse.compare.plan.speedup import Saving
from xlafuse.compare.predict.times import with_predictions
from xlafuse.compare.sources.target_ceilings import target_ceilings

COMPILED = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
MISSED = replace(
    made(
        kernel("k", "elementwise", "s:mul@1", "x", "m"), kernel("l", "elementwise", "s:exp@2", "m", "y"),
        sizes="m=1000000",
    ),
    reasons=(Reason("k", "l", "shape", "no", "xla", 8_000_000),), target="h200",
)
FUSED = replace(made(kernel("k", "elementwise", "s:mul@1 s:exp@2", "x", "y")), target="h200")


ROUNDS = {
    "unfused": [{"device_us": 10.0 + i, "busy_us": 9.0} for i in range(5)],
    "fused": [{"device_us": 6.0 + i, "busy_us": 6.0} for i in range(5)],
}


def priced(graph: FusionGraph) -> float:
    ceilings = target_ceilings("h200")
    return together(with_predictions(graph, ceilings), ceilings).us or 0.0


def command(*arguments: object) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "tools.benchmarks.missed_fusions", *map(str, arguments)]
    return subprocess.run(line, cwd=PROJECT, capture_output=True, text=True, timeout=200, env=COMPILED)


def reply(**changed: Any) -> dict[str, Any]:
    graphs = {"unfused": store.to_json(MISSED), "fused": store.to_json(FUSED)}
    return {"graphs": graphs, "error": 0.0, "tolerance": 0.1, **changed}


def test_the_command_prices_and_checks_a_pair(tmp_path: Path) -> None:
    done = command("--json", tmp_path / "out.json", "--only", "jax-elementwise-l2")
    assert done.returncode == 0, done.stderr
    (found,) = json.loads((tmp_path / "out.json").read_text())["outcomes"]
    at_bandwidth = 3 * 2048**2 * 2 / target_ceilings("h200").bandwidth(1, 1) * 1e6  # x and twice the intermediate
    assert at_bandwidth < found["predicted_us"] < 2 * at_bandwidth and found["kernels"] == [2, 1]
    assert found["name"] in done.stdout


def test_the_pairs_of_pytorch_have_equal_results() -> None:
    torch.manual_seed(0)
    for case in inductor_cases.CASES:
        arrays = [torch.randn(shape, dtype=getattr(torch, dtype)) for shape, dtype in case.small_arrays]
        torch.testing.assert_close(case.unfused(*arrays), case.fused(*arrays), rtol=0.05, atol=0.05)


def test_the_command_refuses_an_unknown_case() -> None:
    done = command("--only", "nothing")
    assert done.returncode == 2 and "nothing" in done.stderr


def test_a_ratio_is_of_the_measured_saving_and_the_price() -> None:
    found = outcome("a", "large", reply(rounds=ROUNDS))
    price = priced(MISSED)
    assert found.predicted_us == pytest.approx(price)
    assert found.realised == Saving(4.0, 4.0, 4.0) and found.busy == Saving(3.0, 3.0, 3.0)
    assert found.ratio == pytest.approx(4.0 / price) and not found.problems


@pytest.mark.parametrize("errors", [(math.nan, 0.0), (0.0, math.nan), (0.0, 0.1)])
def test_one_wrong_array_of_several_is_seen(errors: tuple[float, ...]) -> None:
    found = difference(errors, eps=2**-7)
    assert not found["error"] <= found["tolerance"]


@pytest.mark.parametrize("changed", [
    {"error": 0.2}, {"error": float("nan")},
    {"graphs": {"unfused": store.to_json(FUSED), "fused": store.to_json(FUSED)}},
    {"graphs": {"unfused": store.to_json(MISSED), "fused": store.to_json(MISSED)}},
])
def test_a_pair_that_shows_nothing_does_not_count(changed: dict[str, Any]) -> None:
    found = outcome("a", "large", reply(rounds=ROUNDS, **changed))
    assert found.problems and found.ratio is None and found.realised is None and found.busy is None


def measured_file(path: Path, **changed: Any) -> Path:
    """Write a run of one case on an H200."""
    case = {"size": "large", "error": 0.0, "tolerance": 0.1, "rounds": ROUNDS}
    run: dict[str, Any] = {
        "environments": {"xla": {"device": "NVIDIA H200"}}, "cases": {"jax-a": case},
        "outcomes": [{"name": "jax-a", "kernels": [2, 1], "predicted_us": 1.0}], **changed,
    }
    path.write_text(json.dumps(run))
    return path


def test_measured_times_are_joined_with_the_price_of_the_kernels_compiled_here(tmp_path: Path) -> None:
    measured = read(measured_file(tmp_path / "run.json"))
    compiled = {**reply(error=9.0), "size": "large"}
    found = outcome("jax-a", "large", measured.joined("jax-a", "xla", compiled))
    assert found.predicted_us == pytest.approx(priced(MISSED)) and not found.problems
    assert found.realised == Saving(4.0, 4.0, 4.0)


@pytest.mark.parametrize(("changed", "problem"), [
    ({"outcomes": [{"name": "jax-a", "kernels": [2, 2]}]}, "2 -> 2 kernels were measured, and 2 -> 1 are compiled"),
    ({"environments": {"xla": {"device": "NVIDIA H100 80GB HBM3"}}}, "compiled for h200"),
    ({"cases": {"jax-b": {"rounds": ROUNDS}}}, "no times of this case"),
])
def test_times_of_other_kernels_do_not_count(tmp_path: Path, changed: dict[str, Any], problem: str) -> None:
    measured = read(measured_file(tmp_path / "run.json", **changed))
    found = outcome("jax-a", "large", measured.joined("jax-a", "xla", reply()))
    assert any(problem in each for each in found.problems) and found.realised is None


def test_the_command_prices_the_graphs_of_a_measured_file(tmp_path: Path) -> None:
    """Nothing is compiled, and the file that it writes can be priced again."""
    case = {**reply(), "size": "large", "rounds": ROUNDS}
    file = measured_file(tmp_path / "run.json", cases={"jax-a": case})
    for name in ("first.json", "second.json"):
        done = command("--measured", file, "--json", tmp_path / name)
        assert done.returncode == 0, done.stderr
        assert "..." not in done.stderr  # no worker
        file = tmp_path / name
        (found,) = json.loads(file.read_text())["outcomes"]
        assert found["predicted_us"] == pytest.approx(priced(MISSED)) and found["realised"]["mean"] == 4.0


@pytest.mark.parametrize("text", ["{}", "[]", "no JSON", '{"environments": {}, "cases": {}, "outcomes": []}'])
def test_a_file_without_times_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(NotMeasured, match="run.json"):
        read(tmp_path / "run.json")


def test_the_summary_is_of_the_middle_80_percent() -> None:
    def case(ratio: float, *problems: str) -> Outcome:
        return Outcome("a", "xla", "large", (2, 1), 10.0, Saving(10 * ratio, 0, 0), None, problems)

    found = summary([*(case(i / 10) for i in range(11)), case(99.0, "wrong")])
    assert found is not None
    assert (found.cases, found.median, found.low, found.high) == pytest.approx((11, 0.5, 0.1, 0.9))
    assert summary([case(1.0)]) is None


def test_the_errors_of_prices_are_those_of_the_committed_cases() -> None:
    cases = read_forced(PROJECT / "docs" / "missed-fusions.json")
    for predicted, method in ((True, PRICE), (False, UNPREDICTED)):
        found = summary_of([ratio for one in cases if (ratio := one.ratio(method)) is not None])
        stated = [float(number) for number in re.findall(r"\d[.\d]*", PRICE_ERRORS[predicted])]
        assert found is not None and stated == pytest.approx([found.low, found.high], abs=0.05)
        error = price_error([Price(1, (), 0, 1.0, predicted)])
        assert str(found.cases) in error and found.median == pytest.approx(1, abs=0.05)
