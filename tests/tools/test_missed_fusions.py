"""tools.benchmarks.missed_fusions: prices of forced missed fusions beside the time that fusing them saves."""

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from graph_builder import graph as made
from graph_builder import kernel

from compare.base.paths import PROJECT
from compare.graph import store
from compare.graph.model import Reason
from compare.plan.speedup import Saving
from compare.sources.target_ceilings import target_ceilings
from tools.benchmarks.missed_fusions import inductor_cases
from tools.benchmarks.missed_fusions.case import difference
from tools.benchmarks.missed_fusions.outcome import Outcome, outcome, summary

COMPILED = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
MISSED = replace(
    made(kernel("k", "elementwise", "s:mul@1", "x", "m"), kernel("l", "elementwise", "s:exp@2", "m", "y")),
    reasons=(Reason("k", "l", "shape", "no", "xla", 8_000_000),), target="h200",
)
FUSED = replace(made(kernel("k", "elementwise", "s:mul@1 s:exp@2", "x", "y")), target="h200")


def reply(**changed: Any) -> dict[str, Any]:
    graphs = {"unfused": store.to_json(MISSED), "fused": store.to_json(FUSED)}
    return {"graphs": graphs, "error": 0.0, "tolerance": 0.1, **changed}


def test_the_command_prices_and_checks_a_pair(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tools.benchmarks.missed_fusions", "--json", str(tmp_path / "out.json")]
    command += ["--only", "jax-elementwise-l2"]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=200, env=COMPILED)
    assert done.returncode == 0, done.stderr
    (found,) = json.loads((tmp_path / "out.json").read_text())["outcomes"]
    price = 2 * 2048**2 * 2 / target_ceilings("h200").bandwidth(1, 1) * 1e6
    assert found["predicted_us"] == pytest.approx(price) and found["kernels"] == [2, 1]
    assert found["name"] in done.stdout


def test_the_pairs_of_pytorch_have_equal_results() -> None:
    torch.manual_seed(0)
    for case in inductor_cases.CASES:
        arrays = [torch.randn(shape, dtype=getattr(torch, dtype)) for shape, dtype in case.small_arrays]
        torch.testing.assert_close(case.unfused(*arrays), case.fused(*arrays), rtol=0.05, atol=0.05)


def test_the_command_refuses_an_unknown_case() -> None:
    command = [sys.executable, "-m", "tools.benchmarks.missed_fusions", "--only", "nothing"]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=200, env=COMPILED)
    assert done.returncode == 2 and "nothing" in done.stderr


def test_a_ratio_is_of_the_measured_saving_and_the_price() -> None:
    rounds = {
        "unfused": [{"device_us": 10.0 + i, "busy_us": 9.0} for i in range(5)],
        "fused": [{"device_us": 6.0 + i, "busy_us": 6.0} for i in range(5)],
    }
    found = outcome("a", "large", reply(rounds=rounds))
    price = 8_000_000 / target_ceilings("h200").bandwidth(1, 1) * 1e6
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
    found = outcome("a", "large", reply(**changed))
    assert found.problems and found.ratio is None


def test_the_summary_is_of_the_middle_80_percent() -> None:
    def case(ratio: float, *problems: str) -> Outcome:
        return Outcome("a", "xla", "large", (2, 1), 10.0, Saving(10 * ratio, 0, 0), None, problems)

    found = summary([*(case(i / 10) for i in range(11)), case(99.0, "wrong")])
    assert found is not None
    assert (found.cases, found.median, found.low, found.high) == pytest.approx((11, 0.5, 0.1, 0.9))
    assert summary([case(1.0)]) is None
