"""The lock under which kernels are timed to choose one."""

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

from compare.base.paths import PROJECT
from compare.workers import autotune_lock

TRY = """
import fcntl, sys
try:
    fcntl.flock(open(sys.argv[1], "wb"), fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    print("taken")
"""


SIDE = """
import json
from pathlib import Path
from compare.spec.blocks import BLOCKS
from compare.base.worker_protocol import Untuned
from compare.workers import xla

seen = []

def compile(function, args, *, turn, reuses, **others):
    seen.append([turn and turn.__name__, reuses])
    raise xla.compiler.Unchosen("one of them")

xla.compiler.compile, xla._HAS_GPU = compile, True
block = BLOCKS["gelu"]
for xla._CHOSEN, tune in ((None, False), (None, True), (Path("chosen"), False), (Path("chosen"), True)):
    if not tune:
        side = xla.XlaSide.__new__(xla.XlaSide)
        side._unchosen = set()
        side.inputs = side.cotangents = lambda folder, case: {}
    try:
        side.build(block.cases("check")[0], block.implementation("xla"), Path(), Path(), tune)
    except Untuned as problem:
        seen.append(str(problem))
print(json.dumps(seen))
"""


@contextmanager
def noted(events: list[str]) -> Iterator[None]:
    events.append("taken")
    yield
    events.append("given back")


def said_elsewhere(lock: Path) -> str:
    """By another process that would have the lock at once."""
    done = subprocess.run([sys.executable, "-c", TRY, str(lock)], capture_output=True, text=True, cwd=PROJECT)
    return done.stdout.strip() or done.stderr.strip()


def test_one_process_at_a_time(tmp_path: Path) -> None:
    lock = tmp_path / "tuning"
    with autotune_lock.alone(lock):
        assert said_elsewhere(lock) == "taken"
    assert said_elsewhere(lock) == ""


def test_a_workers_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(autotune_lock.VARIABLE, str(tmp_path / "tuning"))
    with autotune_lock.turn():
        assert said_elsewhere(tmp_path / "tuning") == "taken"
    monkeypatch.delenv(autotune_lock.VARIABLE)
    with autotune_lock.turn():
        assert said_elsewhere(tmp_path / "tuning") == ""


def test_xla_compiles_within_its_turn() -> None:
    jax = pytest.importorskip("jax")
    from xlafuse.compile import compiler

    events: list[str] = []
    compiled = compiler.compile(
        lambda x: x + 1, [jax.ShapeDtypeStruct((3,), "float32")], turn=lambda: noted(events)
    )
    assert events == ["taken", "given back"] and compiled.executable is not None


@pytest.mark.parametrize("complete", [True, False])
def test_what_is_recorded_whole_waits_for_nobody(complete: bool) -> None:
    jax = pytest.importorskip("jax")
    from xlafuse.compile import compiler

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


def test_inductor_times_under_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    from torch._inductor.runtime.benchmarking import InductorBenchmarker, TritonBenchmarker

    from triton_side.inductor import compiler

    events: list[str] = []

    def benchmark(self: object, call: object, **kwargs: object) -> float:
        events.append("timed")
        return 1.0

    for benchmarker in (TritonBenchmarker, InductorBenchmarker):
        monkeypatch.setattr(benchmarker, "benchmark_gpu", benchmark)
    with compiler.timing_under(lambda: noted(events)):
        assert TritonBenchmarker().benchmark_gpu(None) == InductorBenchmarker().benchmark_gpu(None) == 1.0
    assert events == ["taken", "timed", "given back"] * 2
    events.clear()
    InductorBenchmarker().benchmark_gpu(None)
    assert events == ["timed"]


def test_xlas_worker_compiles_without_its_turn_what_it_finds_chosen() -> None:
    """And leaves the rest, where it is not to tune: all, where nothing is known."""
    pytest.importorskip("jax")
    done = subprocess.run([sys.executable, "-c", SIDE], capture_output=True, text=True, cwd=PROJECT)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [
        "nothing that XLA chose is known",
        ["turn", False], "one of them",
        [None, True], "one of them",
        ["turn", False], "one of them",  # it need not be looked for again
    ]


def test_what_may_not_be_timed_is_left() -> None:
    jax = pytest.importorskip("jax")
    from xlafuse.compile import compiler

    class Lowered:
        def compile(self, compiler_options: dict[str, object]) -> str:
            assert compiler_options["xla_gpu_require_complete_aot_autotune_results"]
            raise jax.errors.JaxRuntimeError("NOT_FOUND: No cached config found for HLO instr: ...")

    with pytest.raises(compiler.Unchosen, match="No cached config"):
        compiler._compile_here(Lowered(), {}, None, reuses=True)


def test_inductor_max_is_left_where_nothing_may_be_timed(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from compare.base.worker_protocol import Untuned
    from compare.spec.blocks import BLOCKS
    from compare.workers.pytorch.worker import TorchSide

    block = BLOCKS["gelu"]
    with pytest.raises(Untuned):
        TorchSide().build(block.cases("check")[0], block.implementation("inductor-max"), tmp_path, tmp_path, tune=False)


def test_a_worker_says_that_it_left_something() -> None:
    from compare.base.worker_protocol import Untuned
    from compare.workers.main import _error

    assert _error(Untuned("max-autotune times kernels"))["error"] == {
        "kind": "untuned", "message": "max-autotune times kernels",
    }


def test_what_is_waited_for_a_turn_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not what is done in it."""

    @contextmanager
    def waiting() -> Iterator[None]:
        time.sleep(0.1)
        yield

    monkeypatch.setattr(autotune_lock, "turn", waiting)
    turns = autotune_lock.Turns()
    for number in (1, 2):
        with turns.turn():
            waited = turns.waited
            time.sleep(0.1)
        assert 0.1 * number <= waited == turns.waited


def test_what_hangs_in_its_turn_ends_and_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in code that Python cannot interrupt."""
    lock = tmp_path / "tuning"
    monkeypatch.setenv(autotune_lock.VARIABLE, str(lock))
    code = (
        "import ctypes; from compare import tuning; tuning.LONGEST_SECONDS = 1\n"
        "with tuning.turn(): print(1, flush=True); ctypes.CDLL(None).pause()"
    )
    hanging = subprocess.Popen([sys.executable, "-c", code], cwd=PROJECT, stdout=subprocess.PIPE)
    assert hanging.stdout and hanging.stdout.readline() == b"1\n"
    with autotune_lock.turn():
        assert hanging.wait(10) == -signal.SIGALRM


def test_a_turn_within_its_time_ends_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(autotune_lock.VARIABLE, str(tmp_path / "tuning"))
    code = (
        "import time; from compare import tuning; tuning.LONGEST_SECONDS = 1\n"
        "with tuning.turn(): pass\n"
        "time.sleep(1.5)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=PROJECT).returncode == 0
