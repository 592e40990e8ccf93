"""A process that pretends to have an H200. Starting it and importing PyTorch takes seconds, so tests share one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
PROPERTIES = ROOT / "compare/targets/h200/cuda_device_properties.json"
PROGRAM = """
import contextlib, dataclasses, io, json, os, sys, traceback
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # compilers print, too
from xlafuse.triton_side.deviceless import for_target as deviceless
deviceless.activate(json.load(open(sys.argv[1])))
import torch
for line in sys.stdin:
    torch.compiler.reset()
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            exec(json.loads(line), {"dataclasses": dataclasses, "deviceless": deviceless, "json": json, "torch": torch})
        found = {"answer": json.loads(printed.getvalue().splitlines()[-1])}
    except Exception:
        found = {"error": traceback.format_exc()}
    print(json.dumps(found), file=answers, flush=True)
"""


class FakeGpu:
    def __init__(self, folder: Path) -> None:
        self.log = folder / "log"
        self._process: subprocess.Popen[str] | None = None
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        self._environment = environment | {
            "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(folder), "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        }

    def answer(self, code: str) -> Any:
        """Run the code in a namespace of its own and return the JSON of its last printed line.

        An error in the code is a RuntimeError with its traceback.
        """
        process = self._running()
        assert process.stdin and process.stdout
        try:
            process.stdin.write(json.dumps(code) + "\n")
            process.stdin.flush()
            found = json.loads(process.stdout.readline() or "null")
        except BaseException:
            self.stop()  # otherwise the next test would read this one's answer
            raise
        assert found is not None, f"the process died: {self.log.read_text()[-4000:]}"
        if "error" in found:
            raise RuntimeError(found["error"])
        return found["answer"]

    def _running(self) -> subprocess.Popen[str]:
        if self._process is None or self._process.poll() is not None:
            with self.log.open("a") as log:
                self._process = subprocess.Popen(
                    [sys.executable, "-c", PROGRAM, str(PROPERTIES)], env=self._environment, stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE, stderr=log, text=True,
                )
        return self._process

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


@pytest.fixture(scope="session")
def fake_gpu(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeGpu]:
    process = FakeGpu(tmp_path_factory.mktemp("fake_gpu"))
    yield process
    process.stop()
