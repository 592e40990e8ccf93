"""The wheel, installed where there is no checkout: its files, four commands, and the pytest plugin.

The new environment takes the dependencies from the running one. It has the three packages from the wheel alone. All
programs run in a folder with a module `compare` of a user, which fails when it is imported
(`tests/test_user_modules.py` has the same in the checkout).
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("compare", "triton_side", "xlafuse")
INSTALLED = ("xlafuse", "xlafuse.compare", "xlafuse.triton_side")
FUNCTION = """\
import jax.numpy as jnp

def gelu(x):
    return 0.5 * x * (1 + jnp.tanh(0.8 * (x + 0.04 * x**3)))
"""
TEST = """\
import compare
import jax
from layers import gelu

def test_gelu(fusion):
    assert compare.MINE
    assert len(fusion(gelu, jax.ShapeDtypeStruct((512, 512), "bfloat16"), target="h200").kernels) == 1
"""

Run = Callable[..., str]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    offline = ["--no-build-isolation"] if importlib.util.find_spec("hatchling") else []
    _run(folder, sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", *offline, "-w", folder, ROOT)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def run(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Return a function that runs a program of the new environment in an empty folder, and returns its output."""
    folder = tmp_path_factory.mktemp("installed")
    environment, work = folder / "environment", folder / "work"
    work.mkdir()
    (work / "compare.py").write_text('raise RuntimeError("this module is not for xlafuse")\n')
    _run(work, sys.executable, "-m", "venv", "--without-pip", environment)
    python = environment / "bin" / "python"
    _run(work, sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", wheel)
    (own,) = environment.glob("lib/python*/site-packages")
    running = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (own / "dependencies.pth").write_text("".join(f"{path}\n" for path in sorted(running)))
    imported = _run(work, python, "-c", f"import {', '.join(INSTALLED)}; print({', '.join(INSTALLED)})")
    assert imported.count(f"{own}/") == len(INSTALLED), imported
    assert not (own / "compare").exists() and not (own / "triton_side").exists()

    return lambda program, *arguments: _run(work, environment / "bin" / program, *arguments)


def _run(folder: Path, *command: str | Path) -> str:
    not_the_tests = ("PYTHON", "PYTEST", "TRITON")  # variables of the running tests
    variables = {name: value for name, value in os.environ.items() if not name.startswith(not_the_tests)}
    done = subprocess.run(
        [str(word) for word in command], cwd=folder, env=variables, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_it_holds_every_file_of_the_packages(wheel: Path) -> None:
    files = {
        str(file.relative_to(ROOT)) for package in PACKAGES for file in (ROOT / package).rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    links = {"xlafuse/compare", "xlafuse/triton_side"}  # of the checkout
    assert held == {name if name.startswith("xlafuse/") else f"xlafuse/{name}" for name in files - links}


def test_workers_of_another_interpreter_do_not_import_from_its_site_packages(run: Run) -> None:
    code = "from xlafuse.compare.base import paths; print(paths.python_path())"
    assert "site-packages" not in run("python", "-c", code)


def test_the_program_is_a_module_too(run: Run) -> None:
    assert run("python", "-m", "xlafuse", "list") == run("xlafuse", "list")


@pytest.mark.full
@pytest.mark.slow
def test_run_report_and_inspect(run: Run, tmp_path: Path) -> None:
    out, page = tmp_path / "run", tmp_path / "run.html"
    run("xlafuse", "run", "vector_add", "-i", "xla,triton", "--out", out)
    assert "vector_add" in run("xlafuse", "inspect", out, "--view", "times")
    run("xlafuse", "report", out, "-o", page)
    assert page.stat().st_size > 100_000
    assert "add" in run("xlafuse", "inspect", out, "--block", "vector_add")


@pytest.mark.slow
def test_explain_and_the_pytest_plugin(run: Run, tmp_path: Path) -> None:
    (tmp_path / "layers.py").write_text(FUNCTION)
    (tmp_path / "compare.py").write_text("MINE = True\n")
    (tmp_path / "test_layers.py").write_text(TEST)
    shown = run("xlafuse", "explain", tmp_path / "layers.py:gelu", "--framework", "jax", "--args", "bf16[512,512]")
    assert "1 kernel" in shown and "kernel configurations" in shown
    assert "1 passed" in run("python", "-m", "pytest", "-p", "no:cacheprovider", "--rootdir", tmp_path, tmp_path)
