"""A run is of one program: another one neither resumes it nor merges with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from xlafuse.compare.base import program
from xlafuse.compare.plan import selection
from xlafuse.compare.record import run_folder
from xlafuse.compare.record.record import SCHEMA
from xlafuse.compare.record.run_folder import RunFolderError
from xlafuse.compare.run import run


@pytest.mark.parametrize("commit", ["1" * 40, None])
def test_another_program_does_not_resume_a_run(tmp_path: Path, commit: str | None) -> None:
    plan = selection.resolve(["gelu"], suite="tour", implementations=["xla"])
    made = {"schema": SCHEMA, "target": "h200", "plan": plan.to_json(), "segments": []}
    run_folder.create(tmp_path, {**made, "commit": commit, "dirty": False, "sources": "2" * 64})
    with pytest.raises(RunFolderError, match="commit 1{12}, and this" if commit else "sources 2{12}, and this"):
        run.execute(plan, folder=tmp_path, target="h200", resume=True)
    assert program.describe()["sources"] != "2" * 64
