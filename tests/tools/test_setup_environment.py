"""The search for a newer Python, and the environments that set-up makes, with shell scripts in place of Pythons."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tools import setup_environment
from xlafuse.compare.workers.client import interpreter

pytestmark = pytest.mark.full

PROGRAM = Path(setup_environment.__file__)
# A Python that answers the probe, makes environments by copying itself, and fails at the commands that match FAILS.
FAKE = """#!/bin/sh
case "$*" in
  *FAILS*) for line in $(seq 100); do echo "line $line"; done; exit 3;;
  *print*) echo "usable VERSION";;
  *"-m venv"*) mkdir -p "$3/bin"; cp "$0" "$3/bin/python";;
esac
"""


def fake(path: Path, version: str, fails: str = "no such command") -> Path:
    return script(path, FAKE.replace("VERSION", version).replace("FAILS", f'"{fails}"'))


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder; its `path` is on the search path, its `pyenv` has pyenv's Pythons, and the default is 3.11."""
    default = fake(tmp_path / "default", "3.11.2")
    monkeypatch.setattr(sys, "executable", str(default))
    monkeypatch.setattr(setup_environment.platform, "python_version", lambda: "3.11.2")
    monkeypatch.setenv("PATH", f"{tmp_path / 'path'}:/usr/bin:/bin")
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "pyenv"))
    monkeypatch.setattr(setup_environment, "NEWER", ("3.12", "3.13"))
    monkeypatch.setattr(setup_environment, "PATIENCE_S", 1)
    monkeypatch.delenv("XLAFUSE_XLA_PYTHON", raising=False)
    return tmp_path


@pytest.mark.parametrize(
    "bad", [
        "echo 'python3.12: command not found'; exit 127",  # a pyenv shim
        "echo 3.12.0",
        "echo usable 3.9.1",
        "echo usable 3.12.0; exit 1",
        "sleep 60",
    ],
)
def test_only_a_python_that_answers_is_trusted(machine: Path, bad: str) -> None:
    script(machine / "path" / "python3.12", f"#!/bin/sh\n{bad}\n")
    assert setup_environment.newer_python() is None
    good = fake(machine / "pyenv" / "versions" / "3.13.0" / "bin" / "python", "3.13.0")
    assert setup_environment.newer_python() == setup_environment.Python(str(good), "3.13.0")


def test_a_real_python_answers_the_probe() -> None:
    found = setup_environment.usable(sys.executable)
    assert found and found.version == sys.version.split()[0]
    assert setup_environment.usable("/nowhere/python") is None and setup_environment.usable("") is None


def test_the_python_of_the_recording_comes_first_and_uv_is_asked(machine: Path) -> None:
    fake(machine / "path" / "python3.13", "3.13.1")
    assert setup_environment.newer_python().version == "3.13.1"
    managed = fake(machine / "uv's" / "python", "3.12.9")
    script(machine / "path" / "uv", f'#!/bin/sh\n[ "$*" = "python find 3.12" ] && echo "{managed}"\n')
    assert setup_environment.newer_python().path == str(managed)


def test_xlas_worker_runs_in_the_environment_that_set_up_made(
    machine: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake(machine / "path" / "python3.12", "3.12.4")
    monkeypatch.setattr(sys, "prefix", str(machine / ".venv"))
    assert interpreter("xla") == sys.executable
    assert setup_environment.main(str(machine / ".venv"), "cpu") == 0
    assert interpreter("xla") == str(machine / ".venv-xla" / "bin" / "python")
    assert interpreter("torch") == sys.executable
    assert "not autotuned" not in capsys.readouterr().out
    assert "-m pip install" in (machine / ".venv" / "setup.log").read_text()


def test_a_worker_that_does_not_start_is_not_used(
    machine: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake(machine / "path" / "python3.12", "3.12.4", fails="-m xlafuse.compare.workers.main")
    monkeypatch.setattr(sys, "prefix", str(machine / ".venv"))
    assert setup_environment.main(str(machine / ".venv"), "cpu") == 0
    out = capsys.readouterr().out
    assert "not autotuned" in out and "line 100" in out and str(machine / ".venv-xla" / "setup.log") in out
    assert interpreter("xla") == sys.executable


def test_without_a_newer_python_a_line_says_what_is_lost(machine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert setup_environment.main(str(machine / ".venv"), "cpu") == 0
    assert "not autotuned" in capsys.readouterr().out
    assert not (machine / ".venv-xla").exists()


@pytest.mark.parametrize("fails", ["-m venv", "-m pip"])
def test_a_failure_shows_the_end_of_the_log(machine: Path, capsys: pytest.CaptureFixture[str], fails: str) -> None:
    fake(machine / "default", "3.11.2", fails=fails)
    assert setup_environment.main(str(machine / ".venv"), "cpu") == 1
    out = capsys.readouterr().out
    assert "line 100" in out and "line 50\n" not in out and str(machine / ".venv" / "setup.log") in out


def test_an_existing_environment_keeps_its_python(machine: Path) -> None:
    fake(machine / ".venv" / "bin" / "python", "3.12.7", fails="-m venv")
    assert setup_environment.main(str(machine / ".venv"), "cpu") == 0
    assert not (machine / ".venv-xla").exists()


def test_a_gpu_needs_the_newer_python_itself(machine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert setup_environment.main(str(machine / ".venv"), "cuda") == 1
    assert "make PYTHON=" in capsys.readouterr().out
    fake(machine / "path" / "python3.12", "3.12.4")
    assert setup_environment.main(str(machine / ".venv"), "cuda") == 0
    assert setup_environment.usable(str(machine / ".venv" / "bin" / "python")).version == "3.12.4"
    assert not (machine / ".venv-xla").exists()


def test_an_old_python_says_which_one_is_needed() -> None:
    ast.parse(PROGRAM.read_text(), feature_version=(3, 6))
    code = f"import runpy, sys; sys.version_info = (3, 10, 1); runpy.run_path({str(PROGRAM)!r}, run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1 and "3.11 or newer" in done.stderr
