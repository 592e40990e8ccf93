"""The autotune lock: one process of a run times candidate kernels at a time."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from xlafuse.compare.base.paths import PROJECT
from xlafuse.compare.workers import autotune_lock

TRY = """
import fcntl, sys
try:
    fcntl.flock(open(sys.argv[1], "wb"), fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    print("taken")
"""


BACKEND = """
import json
from pathlib import Path
from xlafuse.compare.spec.blocks import BLOCKS
from xlafuse.compare.base.worker_protocol import NotAutotuned
from xlafuse.compare.workers.xla import worker  # configures XLA before jax is imported
from xlafuse.compare.workers.xla import prepare

seen = []

def compile(function, args, *, autotune_lock, reuses_results, **others):
    seen.append([autotune_lock and autotune_lock.__name__, reuses_results])
    raise prepare.compiler.AutotuningNeeded("one of them")

prepare.compiler.compile = compile
block = BLOCKS["gelu"]
for choices, autotune in ((None, False), (None, True), (Path("chosen"), False), (Path("chosen"), True)):
    if not autotune:
        backend = worker.XlaBackend.__new__(worker.XlaBackend)
        backend.has_gpu, backend.not_recorded = True, set()
        backend.inputs = backend.cotangents = lambda folder, case: {}
    backend.recorded_choices = choices
    try:
        backend.build(block.cpu_check_cases()[0], block.implementation("xla"), Path(), Path(), autotune)
    except NotAutotuned as problem:
        seen.append(str(problem))
print(json.dumps(seen))
"""


@contextmanager
def noted(events: list[str]) -> Iterator[None]:
    events.append("taken")
    yield
    events.append("given back")


def said_elsewhere(lock: Path) -> str:
    """Return the answer of another process that tries to take the lock."""
    done = subprocess.run([sys.executable, "-c", TRY, str(lock)], capture_output=True, text=True, cwd=PROJECT)
    return done.stdout.strip() or done.stderr.strip()


def test_one_process_holds_it_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(autotune_lock.VARIABLE, str(tmp_path / "lock"))
    with autotune_lock.held():
        assert said_elsewhere(tmp_path / "lock") == "taken"
    assert said_elsewhere(tmp_path / "lock") == ""


def test_without_a_run_there_is_nothing_to_wait_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(autotune_lock.VARIABLE, raising=False)
    with autotune_lock.held():
        assert said_elsewhere(tmp_path / "lock") == ""


def test_xla_compiles_under_it() -> None:
    jax = pytest.importorskip("jax")
    from xlafuse.compile import compiler

    events: list[str] = []
    compiled = compiler.compile(
        lambda x: x + 1, [jax.ShapeDtypeStruct((3,), "float32")], autotune_lock=lambda: noted(events)
    )
    assert events == ["taken", "given back"] and compiled.executable is not None


class Recorded:
    """A lowered program whose recorded choices of kernels are complete, or not."""

    def __init__(self, complete: bool, events: list[str]) -> None:
        self.complete, self.events = complete, events

    def compile(self, compiler_options: dict[str, object]) -> str:
        import jax

        if compiler_options.get("xla_gpu_require_complete_aot_autotune_results") and not self.complete:
            raise jax.errors.JaxRuntimeError("NOT_FOUND: No cached config found for HLO instr: ...")
        self.events.append("compiled")
        return "executable"


@pytest.mark.parametrize("complete", [True, False])
def test_a_complete_recording_needs_no_lock(complete: bool) -> None:
    pytest.importorskip("jax")
    from xlafuse.compile import compiler

    events: list[str] = []

    @contextmanager
    def turn() -> Iterator[None]:
        time.sleep(0.5)
        events.append("waited")
        yield

    lowered = Recorded(complete, events)
    compiled, seconds, source = compiler._compile_here(lowered, {}, turn, reuses_results=True)
    assert (compiled, source) == ("executable", "replay" if complete else "device")
    assert events == (["compiled"] if complete else ["waited", "compiled"]) and seconds < 0.5  # waiting is no compiling
    if not complete:
        with pytest.raises(compiler.AutotuningNeeded, match="No cached config"):
            compiler._compile_here(lowered, {}, None, reuses_results=True)  # without permission to autotune


def test_inductor_times_under_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    from torch._inductor.runtime.benchmarking import InductorBenchmarker, TritonBenchmarker

    from xlafuse.triton_side.inductor import compiler

    events: list[str] = []

    def benchmark(self: object, call: object, **kwargs: object) -> float:
        events.append("timed")
        return 1.0

    for benchmarker in (TritonBenchmarker, InductorBenchmarker):
        monkeypatch.setattr(benchmarker, "benchmark_gpu", benchmark)
    with compiler.benchmark_under_lock(lambda: noted(events)):
        assert TritonBenchmarker().benchmark_gpu(None) == InductorBenchmarker().benchmark_gpu(None) == 1.0
    assert events == ["taken", "timed", "given back"] * 2
    events.clear()
    InductorBenchmarker().benchmark_gpu(None)
    assert events == ["timed"]


def test_xla_s_worker_replays_without_the_lock() -> None:
    pytest.importorskip("jax")
    done = subprocess.run([sys.executable, "-c", BACKEND], capture_output=True, text=True, cwd=PROJECT)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [
        "no autotuning results of XLA are recorded",
        ["held", False], "one of them",
        [None, True], "one of them",
        ["held", False], "one of them",  # the first failed search is remembered
    ]


def test_inductor_max_refuses_without_permission_to_autotune(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from xlafuse.compare.base.worker_protocol import NotAutotuned
    from xlafuse.compare.spec.blocks import BLOCKS
    from xlafuse.compare.workers.pytorch.worker import TorchBackend

    block = BLOCKS["gelu"]
    with pytest.raises(NotAutotuned):
        TorchBackend().build(
            block.cpu_check_cases()[0], block.implementation("inductor-max"), tmp_path, tmp_path, autotune=False
        )


def test_the_refusal_has_a_kind_of_its_own() -> None:
    from xlafuse.compare.base.worker_protocol import NotAutotuned
    from xlafuse.compare.workers.main import _error

    assert _error(NotAutotuned("max-autotune times kernels"))["error"] == {
        "kind": "not_autotuned", "message": "max-autotune times kernels",
    }


def test_the_waiting_time_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:

    @contextmanager
    def waiting() -> Iterator[None]:
        time.sleep(0.1)
        yield

    monkeypatch.setattr(autotune_lock, "held", waiting)
    waited = autotune_lock.WaitingTime()
    for number in (1, 2):
        with waited.held():
            before = waited.seconds
            time.sleep(0.1)  # the work under the lock does not count
        assert 0.1 * number <= before == waited.seconds


def test_a_holder_that_hangs_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in code that Python cannot interrupt."""
    monkeypatch.setenv(autotune_lock.VARIABLE, str(tmp_path / "lock"))
    code = (
        "import ctypes; from compare.workers import autotune_lock as lock; lock.LONGEST_SECONDS = 1\n"
        "with lock.held(): print(1, flush=True); ctypes.CDLL(None).pause()"
    )
    hanging = subprocess.Popen([sys.executable, "-c", code], cwd=PROJECT, stdout=subprocess.PIPE)
    assert hanging.stdout and hanging.stdout.readline() == b"1\n"
    with autotune_lock.held():
        assert hanging.wait(10) == -signal.SIGALRM


def test_a_holder_within_its_time_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(autotune_lock.VARIABLE, str(tmp_path / "lock"))
    code = (
        "import time; from compare.workers import autotune_lock as lock; lock.LONGEST_SECONDS = 1\n"
        "with lock.held(): pass\n"
        "time.sleep(1.5)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=PROJECT).returncode == 0
