"""The tuning worker finds a case's choices, compiles their candidates and takes the fastest, by a fake timer.

Its process pretends to have an H200. Candidates compile in threads, because only this process pretends.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from xlafuse.compare.base.paths import PROJECT

PROGRAM = """
import json, os, sys
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
from xlafuse.triton_side.deviceless import for_target
for_target.activate(json.load(open("compare/targets/h200/cuda_device_properties.json")))
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
tuner._call = lambda case: None
tuner._seconds = lambda config, calls: 1e-5 / config.num_warps
case = BLOCKS["vector_add"].cases("quick")[0].to_json()
choices = tuner.choices(case)
assert tuner.choices(case) == []
count = tuner.compile(choices, 600.0)
try:
    found = tuner.search(**choices[0])
except RuntimeError as problem:
    found = str(problem)
print(json.dumps([choices, count, found]), file=answers)
"""


def tuned(crashes: int = 0) -> Any:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(crashes)], cwd=PROJECT, env=environment | {"PYTHONPATH": str(PROJECT)},
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
