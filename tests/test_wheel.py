"""The files of a release: the wheel's contents, its links with and without an address, and its use without a checkout.

The new environment takes the dependencies from the running one, except in the test that installs them. It has the
three packages from the wheel alone. All programs run in a folder with a module `compare` of a user, which fails when
it is imported (`tests/test_user_modules.py` has the same in the checkout).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("compare", "triton_side", "xlafuse")
MORE_LINKS = """
See [the page of [notes]](docs/a.md#b). [![a picture in a link](docs/a.png)](docs/a.md) [elsewhere](https://elsewhere.example/x)
"""
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
    """Build as `make wheel` does: the source distribution, and the wheel from it."""
    folder = tmp_path_factory.mktemp("wheel")
    _run(folder, sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT)
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

    return lambda program, *arguments: _run(work, environment / "bin" / program, *arguments)


def _run(folder: Path, *command: str | Path, timeout_s: int = 240) -> str:
    not_the_tests = ("PYTHON", "PYTEST", "TRITON")  # variables of the running tests
    variables = {name: value for name, value in os.environ.items() if not name.startswith(not_the_tests)}
    done = subprocess.run(
        [str(word) for word in command], cwd=folder, env=variables, capture_output=True, text=True, timeout=timeout_s
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


def test_only_one_name_is_installed_at_top_level(wheel: Path) -> None:
    top = {name.partition("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert top == {"xlafuse", f"{wheel.name.removesuffix('-py3-none-any.whl')}.dist-info"}


def test_an_index_accepts_the_files(wheel: Path) -> None:
    _run(ROOT, sys.executable, "-m", "twine", "check", "--strict", wheel, *wheel.parent.glob("*.tar.gz"))


@pytest.mark.parametrize("address", ["", "https://forge.example/someone/xlafuse"])
def test_links_are_made_from_the_address(tmp_path: Path, address: str) -> None:
    """Without an address there is no relative link, and no picture; with one, all lead to files of the release."""
    for name in ("pyproject.toml", "LICENSE", "tools/package_metadata.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    settings = (ROOT / "pyproject.toml").read_text()
    settings, found = re.subn(r'^address = "[^"]*"', f'address = "{address}"', settings, flags=re.M)
    assert found == 1
    (tmp_path / "pyproject.toml").write_text(settings)
    (tmp_path / "README.md").write_text((ROOT / "README.md").read_text() + MORE_LINKS)
    metadata = json.loads(_run(tmp_path, sys.executable, "-m", "hatchling", "metadata"))
    text, release = metadata["readme"]["text"], f"{address}/blob/v{metadata['version']}"
    links, pictures = _addresses(text, "href"), _addresses(text, "src")
    assert not [link for link in links + pictures if not link.startswith("https://")]
    if not address:
        assert not pictures and "urls" not in metadata
        assert "a picture in a link" not in text and "See the page of [notes]." in text
        return
    assert {f"{release}/docs/README.md", f"{release}/docs/a.md#b", "https://elsewhere.example/x"} <= set(links)
    assert f"{address}/raw/v{metadata['version']}/docs/a.png" in pictures
    assert f"{address}/actions/workflows/tests.yml/badge.svg" in pictures
    assert metadata["urls"]["Report a vulnerability"].startswith(f"{address}/security")
    links += metadata["urls"].values()
    files = {link.partition("#")[0].removeprefix(f"{release}/") for link in links if link.startswith(release)}
    assert len(files) > 10 and [file for file in files if not (ROOT / file).exists()] == ["docs/a.md"]


def _addresses(markdown: str, attribute: str) -> list[str]:
    html = MarkdownIt("commonmark", {"html": True}).enable("table").render(markdown)
    return re.findall(rf' {attribute}="([^"]*)"', html)


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


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_stranger_installs_it_and_explains_a_function_within_a_minute(wheel: Path, tmp_path: Path) -> None:
    """Download the extra `cpu` into an empty environment. Times on this machine: 80 s, then 2 s."""
    environment = tmp_path / "environment"
    (tmp_path / "layers.py").write_text(FUNCTION)
    _run(tmp_path, sys.executable, "-m", "venv", environment)
    pip = (environment / "bin" / "python", "-m", "pip", "install", "-q", f"{wheel}[cpu]")
    _run(tmp_path, *pip, timeout_s=1500)
    started = time.monotonic()
    shown = _run(tmp_path, environment / "bin" / "xlafuse", "explain", "layers.py:gelu", "--args", "bf16[512,512]")
    assert time.monotonic() - started < 60
    assert "1 kernel" in shown
