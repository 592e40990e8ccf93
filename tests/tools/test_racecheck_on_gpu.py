"""Hazards that racecheck reports around mbarriers; `docs/faults.md` names this limit of its version 2026.4."""

import subprocess
import sys
from pathlib import Path

import pytest

from tools.sanitizer import run as sanitize
from tools.sanitizer.log import parse

PROGRAM = Path(__file__).with_name("mbarrier_program.py")


@pytest.mark.gpu
@pytest.mark.parametrize(("arriving", "reported"), [("all", False), ("one", True)])
def test_racecheck_follows_an_mbarrier_only_for_the_threads_that_arrive(arriving: str, reported: bool) -> None:
    try:
        sanitizer = sanitize.find_sanitizer()
    except sanitize.CannotCheck as problem:
        pytest.skip(str(problem))
    if not (version := sanitize.version_of(sanitizer)).startswith("2026.4"):
        pytest.skip(f"compute-sanitizer {version} may follow mbarriers in another way")
    done = subprocess.run(
        [sanitizer, "--tool", "racecheck", sys.executable, str(PROGRAM), arriving],
        capture_output=True, text=True, timeout=120, check=True,
    )
    outcome = parse("racecheck", done.stdout, [])
    assert outcome.errors is not None and bool(outcome.errors) == reported, done.stdout
