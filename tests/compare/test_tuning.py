"""The lock under which kernels are timed to choose one."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from compare import PROJECT, tuning

TRY = """
import fcntl, sys
try:
    fcntl.flock(open(sys.argv[1], "wb"), fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    print("taken")
"""


def said_elsewhere(lock: Path) -> str:
    """By another process that would have the lock at once."""
    done = subprocess.run([sys.executable, "-c", TRY, str(lock)], capture_output=True, text=True, cwd=PROJECT)
    return done.stdout.strip() or done.stderr.strip()


def test_one_process_at_a_time(tmp_path: Path) -> None:
    lock = tmp_path / "tuning"
    with tuning.alone(lock):
        assert said_elsewhere(lock) == "taken"
    assert said_elsewhere(lock) == ""


def test_a_workers_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(tuning.VARIABLE, str(tmp_path / "tuning"))
    with tuning.turn():
        assert said_elsewhere(tmp_path / "tuning") == "taken"
    monkeypatch.delenv(tuning.VARIABLE)
    with tuning.turn():
        assert said_elsewhere(tmp_path / "tuning") == ""


def test_xla_compiles_within_its_turn() -> None:
    jax = pytest.importorskip("jax")
    from xlafuse import compiler

    events: list[str] = []

    @contextmanager
    def turn() -> Iterator[None]:
        events.append("taken")
        yield
        events.append("given back")

    compiled = compiler.compile(lambda x: x + 1, [jax.ShapeDtypeStruct((3,), "float32")], turn=turn)
    assert events == ["taken", "given back"] and compiled.executable is not None


@pytest.mark.parametrize("complete", [True, False])
def test_what_is_recorded_whole_waits_for_nobody(complete: bool) -> None:
    jax = pytest.importorskip("jax")
    from xlafuse import compiler

    events: list[str] = []

    @contextmanager
    def turn() -> Iterator[None]:
        time.sleep(0.5)
        events.append("waited")
        yield

    class Lowered:
        def compile(self, compiler_options: dict[str, object]) -> str:
            if compiler_options.get("xla_gpu_require_complete_aot_autotune_results") and not complete:
                raise jax.errors.JaxRuntimeError("NOT_FOUND: No cached config found for HLO instr: ...")
            events.append("compiled")
            return "executable"

    compiled, seconds, source = compiler._compile_here(Lowered(), {}, turn, reuses=True)
    assert (compiled, source) == ("executable", "replay" if complete else "device")
    assert events == (["compiled"] if complete else ["waited", "compiled"]) and seconds < 0.5  # waiting is no compiling
