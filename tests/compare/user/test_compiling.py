"""The compiling process is kept for the next request, and shows what a fresh one would show."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from full_marks import full

import xlafuse
from xlafuse import FusionGraph
from xlafuse.compare.base.paths import python_path
from xlafuse.compare.user import compiling

pytestmark = pytest.mark.slow
MODULE = """
import os
from pathlib import Path
import jax

with Path(__file__).with_name("imports").open("a") as file:
    file.write(f"{os.getpid()}\\n")

KEPT = {}

def registered_once(x):
    assert not hasattr(jax, "registered_by_kept_code")
    jax.registered_by_kept_code = True
    return jax.numpy.tanh(x)

def f(x):
    return RESULT
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    """Return a function that writes a module's file, and imports it."""
    monkeypatch.syspath_prepend(tmp_path)

    def written(result: str) -> ModuleType:
        (tmp_path / "kept_code.py").write_text(MODULE.replace("RESULT", result))
        sys.modules.pop("kept_code", None)
        import kept_code

        return kept_code

    sys.dont_write_bytecode, before = True, sys.dont_write_bytecode
    yield written
    sys.dont_write_bytecode = before
    sys.modules.pop("kept_code", None)


def explained(function: Any) -> FusionGraph:
    import jax

    return xlafuse.explain(function, jax.ShapeDtypeStruct((256, 256), "float32"), target="h200").graph


def kernels(function: Any) -> int:
    return len(explained(function).kernels or ())


def importers(folder: Path) -> list[int]:
    """Return the compiling processes that imported the module, in order."""
    pids = [int(line) for line in (folder / "imports").read_text().split()]
    return [pid for pid in pids if pid != os.getpid()]


def wait_until_ended(pid: int) -> None:
    def ended() -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        except (FileNotFoundError, ProcessLookupError):  # the latter where it ends while its file is read
            return True

    deadline = time.monotonic() + 20
    while not ended() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert ended()


def test_a_process_serves_until_it_dies(module: Callable[[str], ModuleType], tmp_path: Path) -> None:
    assert kernels(module("jax.numpy.tanh(x)").f) == 1
    assert kernels(module("jax.numpy.tanh(x) @ x").f) == 2
    first, second = importers(tmp_path)
    assert first == second
    os.kill(first, signal.SIGKILL)
    wait_until_ended(first)
    assert kernels(sys.modules["kept_code"].f) == 2 and importers(tmp_path)[-1] != first


def test_a_call_does_not_see_what_an_earlier_one_kept(module: Callable[[str], ModuleType]) -> None:
    function = module("x * KEPT.setdefault('first', x)").f
    graphs = [explained(function) for _ in range(2)]
    assert graphs[0].buffers == graphs[1].buffers


def test_a_call_does_not_see_the_settings_of_an_earlier_one(module: Callable[[str], ModuleType]) -> None:
    before = explained(module("x.astype(float) + 1").f)
    explained(module("jax.config.update('jax_enable_x64', True) or x + 1").f)
    assert explained(module("x.astype(float) + 1").f).buffers == before.buffers


@pytest.mark.parametrize(
    ("setting", "is_set"),
    [
        ("_inductor.config.max_fusion_size = 1", "_inductor.config.max_fusion_size == 1"),
        full(
            "_dynamo.config.reorderable_logging_functions.add(1)", "_dynamo.config.reorderable_logging_functions >= {1}"
        ),
        full("_functorch.config.activation_memory_budget = 0.5", "_functorch.config.activation_memory_budget == 0.5"),
    ],
)
def test_a_call_does_not_see_what_an_earlier_one_set_for_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str, is_set: str
) -> None:
    torch = pytest.importorskip("torch")
    (tmp_path / "setting_code.py").write_text(f"""
import os, torch, torch._dynamo.config, torch._inductor.config, torch._functorch.config
CHANGED = torch.{is_set}
if "XLAFUSE_SCRATCH" in os.environ:  # in the compiling process
    torch.{setting}
def f(x):
    return torch.tanh(x) @ x if CHANGED else torch.tanh(x)
""")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "setting_code", raising=False)
    import setting_code

    x = torch.empty(256, 256, device="meta")
    found = [xlafuse.explain(setting_code.f, x, target="h200").graph.kernels or () for _ in range(2)]
    assert list(map(len, found)) == [1, 1]


def test_a_call_does_not_see_a_deleted_attribute_of_a_class_sent_by_value() -> None:
    import jax

    class Options:
        multiplied = True

    def f(x: Any) -> Any:
        return jax.numpy.tanh(x) @ x if hasattr(Options, "multiplied") else jax.numpy.tanh(x)

    assert kernels(f) == 2
    del Options.multiplied
    assert kernels(f) == 1


def test_a_failure_in_a_used_process_is_tried_in_a_fresh_one(
    module: Callable[[str], ModuleType], tmp_path: Path
) -> None:
    function = module("registered_once(x)").f
    assert kernels(function) == kernels(function) == 1
    assert len(set(importers(tmp_path))) == 2


def test_an_idle_process_is_ended(
    module: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling, "IDLE_SECONDS", 0.1)
    kernels(module("jax.numpy.exp(x)").f)
    wait_until_ended(importers(tmp_path)[-1])


def test_folders_of_a_killed_caller_are_removed_by_the_next_one(
    module: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "temporary"
    place.mkdir()
    program = f"""
import os, signal, jax, xlafuse
from pathlib import Path
def f(x):
    Path({str(tmp_path / "pid")!r}).write_text(str(os.getpid()))
    os.kill(os.getppid(), signal.SIGKILL)
xlafuse.explain(f, jax.ShapeDtypeStruct((8,), "float32"), target="h200")
"""
    environment = os.environ | {"TMPDIR": str(place), "PYTHONPATH": python_path()}
    killed = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    wait_until_ended(int((tmp_path / "pid").read_text()))
    left = list(place.glob("xlafuse-*"))
    assert left
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    monkeypatch.setenv("TMPDIR", str(place))  # so that no process that was kept serves
    assert kernels(module("jax.numpy.tanh(x)").f) == 1
    assert not [path for path in left if path.exists()]
