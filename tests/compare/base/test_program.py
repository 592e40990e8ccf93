"""A run's program is known by its commit, and a copy without a repository by its sources."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from xlafuse.compare.base import program
from xlafuse.compare.base.paths import PROJECT

PACKAGES = ("compare", "triton_side", "xlafuse")


def git(folder: Path, *words: str) -> str:
    who = ("-c", "user.name=a", "-c", "user.email=a@b.c")
    return subprocess.run(["git", "-C", str(folder), *who, *words], check=True, capture_output=True, text=True).stdout


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """Return a repository with a few files of each package, all committed."""
    folder = tmp_path / "copy"
    for name in ("compare/base/paths.py", "triton_side/versions.py", "xlafuse/__init__.py"):
        (folder / name).parent.mkdir(parents=True)
        shutil.copy(PROJECT / name, folder / name)
    for package in ("compare", "triton_side"):
        (folder / "xlafuse" / package).symlink_to(f"../{package}")
    git(folder, "init", "-q")
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "a")
    return folder


def test_the_sources_of_a_copy_name_its_commit(copy: Path, tmp_path: Path) -> None:
    commit = program.head_of(copy)
    assert commit == git(copy, "rev-parse", "HEAD").strip()
    sources = program.sources_in(copy)
    assert program.sources_at(copy, commit) == sources
    wheel = tmp_path / "wheel"
    shutil.copytree(copy / "xlafuse", wheel / "xlafuse")  # with the packages behind the links, as a wheel has them
    (wheel / "xlafuse" / "__pycache__").mkdir()
    (wheel / "compare").mkdir()
    (wheel / "compare" / "another.py").write_text("")
    assert program.sources_in(wheel) == sources
    assert program.head_of(wheel) is None


def test_a_change_of_the_code_is_another_program(copy: Path) -> None:
    sources, commit = program.sources_in(copy), program.head_of(copy)
    (copy / "compare" / "notes.txt").write_text("no code")
    assert program.sources_in(copy) == sources
    (copy / "compare" / "base" / "paths.py").write_text("PROJECT = None")
    assert program.sources_in(copy) != sources == program.sources_at(copy, str(commit))


def test_this_checkout_is_described() -> None:
    described = program.describe()
    assert described["sources"] == program.sources_in(PROJECT)
    if described["commit"] is not None:
        assert described["dirty"] == (program.sources_at(PROJECT, described["commit"]) != described["sources"])
        assert described["commit"][:12] in program.in_words(described)
