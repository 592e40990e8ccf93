"""Faults between a worker's process and the runner, in both directions."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from xlafuse.compare.base.paths import PROJECT
from xlafuse.compare.workers.client import Worker, WorkerDied, WorkerError
from xlafuse.compare.workers.pool import WorkerPool

SERVES_HANG = """
import time
from xlafuse.compare.workers import main as worker
worker.methods_of = lambda role: {"hang": lambda: time.sleep(600)}
worker.main()
"""
ASKS_AND_WAITS = """
import sys
from pathlib import Path
from xlafuse.compare.workers.client import Worker
worker = Worker("odd", Path(sys.argv[1]), command=[sys.executable, "-c", sys.argv[2], "odd"])
worker.wait_ready(60)
print(worker._process.pid, flush=True)
worker.ask("hang")
"""


def test_a_worker_that_lost_its_gpu_is_replaced(worker: Worker) -> None:
    with pytest.raises(WorkerDied, match="illegal memory access.*the odd worker could not use the GPU any more"):
        worker.ask("lose")
    assert not worker.alive


@pytest.mark.parametrize(
    ("jax", "reason"),
    [("raise OSError('libcuda.so.1: wrong ELF')", "OSError: libcuda.so.1"), ("raise SystemExit(3)", "SystemExit")],
)
def test_an_import_that_raises_is_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jax: str, reason: str
) -> None:
    (tmp_path / "jax.py").write_text(jax)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    pool = WorkerPool(tmp_path, {})
    try:
        with pytest.raises(WorkerError, match=reason) as refusal:
            pool.ask("xla", "environment")
        assert refusal.value.kind == "failed"
    finally:
        pool.stop()


def test_an_import_that_kills_the_process_is_a_death(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "jax.py").write_text("import ctypes; ctypes.string_at(0)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    pool = WorkerPool(tmp_path, {})
    try:
        with pytest.raises(WorkerDied, match="signal SIGSEGV"):
            pool.ask("xla", "environment")
    finally:
        pool.stop()


def test_a_busy_worker_ends_with_a_killed_runner(tmp_path: Path) -> None:
    orchestrator = subprocess.Popen(
        [sys.executable, "-c", ASKS_AND_WAITS, str(tmp_path / "odd.log"), SERVES_HANG], stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(PROJECT), os.environ.get("PYTHONPATH", "")])},
    )
    assert orchestrator.stdout
    process = int(orchestrator.stdout.readline())
    try:
        time.sleep(0.5)  # it is in the request now
        assert _runs(process)
        orchestrator.kill()
        orchestrator.wait()
        deadline = time.monotonic() + 20
        while _runs(process) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not _runs(process)
    finally:
        if _runs(process):
            os.kill(process, signal.SIGKILL)


def _runs(process: int) -> bool:
    """Return whether the process runs; a zombie does not."""
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"
