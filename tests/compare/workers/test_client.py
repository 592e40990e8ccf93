"""Workers that answer, refuse, die, hang and print too much."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from xlafuse.compare.workers.client import Worker, WorkerDied, WorkerError, WorkerTimeout, interpreter
from xlafuse.compare.workers.pool import WorkerPool


def test_it_answers(worker: Worker) -> None:
    assert worker.ask("echo", number=3, text="ä\n") == {"number": 3, "text": "ä\n"}
    assert len(worker.ask("large")) == 8 << 20
    assert worker.ask("echo") == {}


def test_a_refusal_carries_its_kind_and_the_worker_lives_on(worker: Worker) -> None:
    with pytest.raises(WorkerError, match="no GPU here") as refusal:
        worker.ask("refuse")
    assert refusal.value.kind == "skipped"
    assert worker.ask("echo", a=1) == {"a": 1}


@pytest.mark.parametrize(("method", "how"), [("exit", "exit code 7"), ("kill", "signal SIGKILL")])
def test_a_death_says_how(worker: Worker, method: str, how: str) -> None:
    with pytest.raises(WorkerDied, match=how):
        worker.ask(method)
    assert not worker.alive
    with pytest.raises(WorkerDied):
        worker.ask("echo")


def test_a_hang_ends_at_the_time_limit(worker: Worker) -> None:
    with pytest.raises(WorkerTimeout, match="within 1 s"):
        worker.ask("hang", timeout=1)
    assert not worker.alive


@pytest.mark.parametrize("own", [None, "1"])
def test_inductors_compile_processes_stay_unless_the_user_says_otherwise(
    odd_pool: WorkerPool, monkeypatch: pytest.MonkeyPatch, own: str | None
) -> None:
    name = "TORCHINDUCTOR_QUIESCE_ASYNC_COMPILE_POOL"
    monkeypatch.delenv(name, raising=False)
    if own:
        monkeypatch.setenv(name, own)
    assert odd_pool.ask("odd", "variable", name=name) == (own or "0")


def test_a_pool_starts_a_worker_again_after_its_death(odd_pool: WorkerPool) -> None:
    os.kill(odd_pool.ask("odd", "process"), signal.SIGKILL)
    with pytest.raises(WorkerDied):
        odd_pool.ask("odd", "echo")
    assert odd_pool.ask("odd", "echo", a=1) == {"a": 1}


def test_a_restarted_worker_is_a_fresh_one(odd_pool: WorkerPool) -> None:
    odd_pool.start(["odd"])
    before = odd_pool.ask("odd", "process")
    odd_pool.restart(["odd"])
    assert odd_pool.running() == [] and not Path(f"/proc/{before}").exists()
    assert odd_pool.ask("odd", "process") != before and odd_pool.running() == ["odd"]


@pytest.mark.slow
def test_a_framework_that_is_not_installed_is_a_skip_with_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "jax.py").write_text("raise ModuleNotFoundError(\"No module named 'jax'\", name='jax')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    pool = WorkerPool(tmp_path, {"PYTHONPATH": f"{Path(__file__).parents[3]}:{tmp_path}"})
    try:
        for _ in range(2):  # the second ask does not start another process that fails
            with pytest.raises(WorkerError, match="jax is not installed.*pip install") as refusal:
                pool.ask("xla", "environment")
            assert refusal.value.kind == "skipped"
    finally:
        pool.stop()


def test_each_framework_has_its_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "prefix", "/nowhere/.venv")  # without an environment of XLA's worker beside it
    monkeypatch.setenv("XLAFUSE_XLA_PYTHON", "/xla/python")
    monkeypatch.setenv("XLAFUSE_TORCH_PYTHON", "/torch/python")
    assert interpreter("xla") == "/xla/python"
    assert {interpreter(role) for role in ("torch", "reference", "interpreter", "target")} == {"/torch/python"}
    monkeypatch.delenv("XLAFUSE_XLA_PYTHON")
    assert interpreter("xla") == sys.executable
