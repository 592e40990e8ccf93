"""Benchmarks that need no GPU run and print their tables."""

import os
import subprocess
import sys

import pytest

from xlafuse.compare.base.paths import PROJECT

COMPILED = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}


@pytest.mark.full
def test_host_cost_counts_launches() -> None:
    command = [sys.executable, "tools/benchmarks/host_cost.py", "vector_add", "rmsnorm"]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=200, env=COMPILED)
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines() if "/prime/" in line]
    assert {case: int(launches) for case, launches, *_ in rows} == {
        "vector_add/prime/fp32/fwd": 1, "rmsnorm/prime/fp32/fwd": 1, "rmsnorm/prime/fp32/train": 3,
    }
    assert all(float(cost) > 0 for _, _, *costs in rows for cost in costs)


def test_host_cost_refuses_an_unknown_block() -> None:
    command = [sys.executable, "tools/benchmarks/host_cost.py", "nothing"]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=200, env=COMPILED)
    assert done.returncode == 2
    assert "nothing" in done.stderr and "vector_add" in done.stderr
