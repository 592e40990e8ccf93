"""Parallel test processes: none takes all the cores, with or without a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = """
import ctypes, json, os, runpy, sys
class Driver:
    def __init__(self, name): pass
    def cuInit(self, flags): return 0 if sys.argv[2] == "True" else 100
    def cuDeviceGetCount(self, count): count._obj.value = 1; return 0
ctypes.CDLL = Driver
assert runpy.run_path(sys.argv[1])["HAS_GPU"] == (sys.argv[2] == "True")
print(json.dumps({name: os.environ.get(name) for name in json.loads(sys.argv[3])}))
"""
THREADS = ("OMP_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS")


def environment(gpu: bool, **given: str) -> dict[str, str | None]:
    kept = {name: value for name, value in os.environ.items() if name not in THREADS}
    conftest = str(Path(__file__).with_name("conftest.py"))
    done = subprocess.run(
        [sys.executable, "-c", CONFTEST, conftest, str(gpu), json.dumps(THREADS)],
        env=kept | given, capture_output=True, text=True, check=True,
    )
    return dict(json.loads(done.stdout))


@pytest.mark.parametrize("gpu", [False, True])
def test_a_test_process_has_few_threads_by_default(gpu: bool) -> None:
    assert environment(gpu) == dict(zip(THREADS, ("1", "2" if gpu else "1"), strict=True))
    assert environment(gpu, OMP_NUM_THREADS="5")["OMP_NUM_THREADS"] == "5"
