"""A test run that is cut off has printed the failures so far."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

PROJECT = Path(__file__).parents[1]
TESTS = """
import os

def test_that_fails():
    assert False

def test_that_passes():
    pass

def test_that_ends_the_run():
    os._exit(7)
"""


def test_a_failure_is_printed_when_it_happens(tmp_path: Path) -> None:
    shutil.copy(PROJECT / "tests" / "conftest.py", tmp_path)
    (tmp_path / "test_run.py").write_text(TESTS)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), str(tmp_path)],
        capture_output=True, text=True, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(PROJECT)},
    )
    assert done.returncode == 7
    assert "failed: test_run.py::test_that_fails (call)" in done.stdout
    assert "test_that_passes" not in done.stdout
