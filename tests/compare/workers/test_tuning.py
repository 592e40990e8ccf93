"""The tuning worker finds a case's choices, compiles their candidates and takes the fastest, by a fake timer.

Its process pretends to have a GPU. Candidates compile in this process, because no other one pretends.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
from pretended_gpus import GPUS

from xlafuse.compare.base.paths import PROJECT
from xlafuse.compare.targets import load

PROGRAM = """
import json, os, sys
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
from xlafuse.triton_side.deviceless import for_target
for_target.activate(json.loads(sys.argv[2]))
import triton
from xlafuse.compare.spec.blocks import BLOCKS
from xlafuse.compare.workers.pytorch import tuning

class Pool:
    def __init__(self, *ignored): pass
    def submit(self, function, *given):
        future = Future()
        if function is tuning.compile_candidates and crashes():
            future.set_exception(BrokenProcessPool())
        else:
            future.set_result(function(*given))
        return future
    def shutdown(self, **ignored): pass

from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
left_crashes = [int(sys.argv[1])]
def crashes():
    left_crashes[0] -= 1
    return left_crashes[0] >= 0

def launches_with(call, choice, config, same):
    if config.num_warps == 16:
        raise triton.OutOfResources(1, 0, "threads")
    return config

tuning.ProcessPoolExecutor = Pool
tuning.trials.launches_with = launches_with
tuner = tuning.Tuner(None)
tuner._call = lambda *ignored: None
tuner._seconds = lambda config, calls: 1e-5 / config.num_warps
if sys.argv[4:]:
    from xlafuse.triton_side.kernels.shared.matmul_tiles import MatmulConfig
    tuning.spaces.candidates = lambda choice: [MatmulConfig(**each) for each in json.loads(sys.argv[4])]
case = BLOCKS[sys.argv[3]].cases("quick")[0].to_json()
choices = tuner.choices(case, "triton")
assert tuner.choices(case, "triton") == []
count = tuner.compile(choices, 600.0)
try:
    found = tuner.search(**choices[0])
except RuntimeError as problem:
    found = str(problem)
print(json.dumps([choices, count, found]), file=answers)
"""


def tuned(
    crashes: int = 0, properties: dict[str, Any] | None = None, block: str = "vector_add", candidates: Any = None
) -> Any:
    """Return the choices, the number of candidates, and the first choice's outcome, on a pretended GPU."""
    given = [str(crashes), json.dumps(properties or load("h200").device_properties()), block]
    given += [json.dumps(candidates)] if candidates else []
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *given], cwd=PROJECT, env=environment | {"PYTHONPATH": str(PROJECT)},
        capture_output=True, text=True, timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_fastest_candidate_that_runs_is_found() -> None:
    choices, count, found = tuned()
    assert choices == [{"kernel": "vector_add.configure", "shape_class": {"element_bytes": 2}}]
    assert count == found["candidates"] == 20
    assert found["before"]["num_warps"] == 4 and found["config"]["num_warps"] == 8
    assert found["us"] < found["before_us"] and found["case"].startswith("vector_add/")


@pytest.mark.full
def test_a_crash_of_the_compiler_costs_no_other_candidate() -> None:
    _, _, found = tuned(crashes=1)
    assert found["dropped"] == {} and found["config"]["num_warps"] == 8


@pytest.mark.full
def test_a_compiler_that_always_crashes_is_named() -> None:
    _, _, found = tuned(crashes=1000)
    assert "crashes the compiler" in found


SMALL = {"block_m": 64, "block_n": 64, "block_k": 32, "num_warps": 4, "num_stages": 2}
TIGHT = GPUS["sm_121"].properties | {"shared_memory_per_block_optin": 48 << 10}
LARGE = {"block_m": 128, "block_n": 256, "block_k": 64, "num_warps": 8, "num_stages": 4}


def test_a_gpu_that_cannot_run_the_present_configuration_gets_one_that_it_can() -> None:
    (choice, *_), _, found = tuned(properties=TIGHT, block="matmul", candidates=[SMALL])
    assert choice["kernel"] == "matmul.matmul_config"
    assert found["before_us"] is None and SMALL.items() <= found["config"].items()
    assert found["dropped"] == {"exceeds shared memory": 1} and found["shared_bytes"] <= 48 << 10


@pytest.mark.full
def test_a_gpu_that_can_run_no_configuration_is_told_so() -> None:
    _, _, found = tuned(properties=TIGHT, block="matmul", candidates=[LARGE])
    assert "no configuration can be used" in found and "exceeds shared memory" in found
