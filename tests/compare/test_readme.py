"""The README's table is what its command prints from the committed run."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

PROJECT = Path(__file__).parents[2]


def test_the_results_come_from_the_run() -> None:
    readme = (PROJECT / "README.md").read_text()
    found = re.search(r"<!-- results: xlafuse (.*?) -->\n\n(.*?)\n\n<!-- /results -->", readme, re.DOTALL)
    assert found, "README.md has no results"
    command = [sys.executable, "-m", "compare", *shlex.split(found[1])]
    printed = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=True).stdout
    assert found[2] == printed.strip()


def test_the_committed_run_is_whole_and_its_tables_are_its_own() -> None:
    run = PROJECT / "reports" / "h200-quick"
    for name, options in (("report.md", ["--markdown"]), ("matrix.md", ["--matrix", "--markdown"])):
        command = [sys.executable, "-m", "compare", "report", str(run), *options]
        printed = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=True)
        assert printed.stdout == (run / name).read_text()
        assert not printed.stderr
