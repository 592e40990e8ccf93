"""A user's project with a module or package `compare`: xlafuse works in it, and the user's tests get their own module.

These tests use the checkout. Those of `tests/test_wheel.py` run in such a project with an installed wheel.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FAILS = 'raise RuntimeError("this module is not for xlafuse")\n'
FUNCTION = "import jax.numpy as jnp\n\ndef f(x):\n    return jnp.tanh(x) * 2\n"
TESTS = """\
import compare
import jax


def test_helper():
    assert compare.VALUE == 7


def test_kernels(fusion):
    assert len(fusion(compare.times_value, jax.ShapeDtypeStruct((64, 64), "float32"), target="h200").kernels) == 1
    assert fusion.matches_snapshot()
"""
HELPER = "VALUE = 7\n\n\ndef times_value(x):\n    return x * VALUE + 1\n"

Run = Callable[..., str]


@pytest.fixture(params=["module", "package"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Run:
    """Return a function that runs Python in a user's project, and returns its output."""
    if request.param == "package":
        (tmp_path / "compare").mkdir()
    (tmp_path / ("compare.py" if request.param == "module" else "compare/__init__.py")).write_text(FAILS)
    (tmp_path / "f.py").write_text(FUNCTION)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "compare.py").write_text(HELPER)
    (tmp_path / "tests" / "test_it.py").write_text(TESTS)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}

    def run(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, f"{arguments}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    return run


@pytest.mark.parametrize("run", ["package"], indirect=True)
def test_commands_without_a_framework(run: Run) -> None:
    assert "gelu" in run("-m", "xlafuse", "list")
    assert "kernel" in run("-m", "xlafuse", "inspect", str(ROOT / "tests" / "data" / "xla" / "softmax.hlo.txt"))


def test_pytest_without_the_fixture(run: Run) -> None:
    assert "1 passed" in run("-m", "pytest", "-p", "xlafuse.pytest_plugin", "-p", "no:cacheprovider", "-k", "helper")


@pytest.mark.slow
@pytest.mark.parametrize("run", ["module"], indirect=True)
def test_pytest_with_the_fixture(run: Run) -> None:
    """The compiling process imports the user's `compare`, whose function it compiles."""
    output = run("-m", "pytest", "-p", "xlafuse.pytest_plugin", "-p", "no:cacheprovider", "--xlafuse-update")
    assert "2 passed" in output and "written: tests/fusion_snapshots/test_it/test_kernels@" in output


@pytest.mark.slow
@pytest.mark.parametrize("run", ["package"], indirect=True)
def test_explain(run: Run) -> None:
    functions = ("f.py:f", "tests/compare.py:times_value")
    options = ("--framework", "jax", "--args", "f32[64,64]", "--target", "h200")
    shown = run("-m", "xlafuse", "explain", *functions, *options, "--json")
    assert list(json.loads(shown)["graphs"]) == ["f", "times_value"]


@pytest.mark.slow
@pytest.mark.parametrize("run", ["module"], indirect=True)
def test_run_starts_workers(run: Run) -> None:
    options = ("-i", "xla", "--direction", "fwd", "--target", "h200", "--out", "run")
    assert "1 of 1 programs" in run("-m", "xlafuse", "run", "vector_add", *options)
