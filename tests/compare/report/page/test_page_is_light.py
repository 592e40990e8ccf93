"""The page of a large run has few megabytes, and writing it imports no framework."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from xlafuse.compare.base.paths import PROJECT

RUN = PROJECT / "reports" / "h200"
HEAVY = {"jax", "jaxlib", "torch", "triton", "flax", "pandas"}  # numpy computes the intervals of verdicts
DRIVER = """
import json, sys
from xlafuse.compare.cli.main import cli
try:
    cli(sys.argv[1:])
finally:
    print(json.dumps(sorted(sys.modules)), file=sys.stderr)
"""


@pytest.mark.full
def test_the_page_of_a_large_run(tmp_path: Path) -> None:
    """The run has nearly all cases of the full suite."""
    out = tmp_path / "page.html"
    command = [sys.executable, "-c", DRIVER, "report", str(RUN), "-o", str(out)]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert "1,760 records of 192 cases" in done.stdout
    assert not HEAVY & set(json.loads(done.stderr.splitlines()[-1]))
    assert out.stat().st_size < 192 * 28_000


@pytest.mark.parametrize(
    "command", [["report", "--help"], ["inspect", str(RUN), "--view", "times"]], ids=["help", "table"]
)
def test_other_reports_do_not_import_the_page(command: list[str]) -> None:
    done = subprocess.run([sys.executable, "-c", DRIVER, *command], cwd=PROJECT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not {"vl_convert", "jinja2", "xlafuse.compare.report.page"} & set(json.loads(done.stderr.splitlines()[-1]))
