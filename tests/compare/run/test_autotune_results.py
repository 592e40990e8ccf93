"""XLA's autotune results of a run: copied into it, joined from its processes, compared with the jax that runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from xlafuse.compare.base.usage import UsageError
from xlafuse.compare.plan.selection import autotune_results as recorded_results
from xlafuse.compare.run import autotune_results

ENTRY = "entries {{\n  key {{\n    hlo: {0}\n  }}\n  value {{\n    x: 1\n  }}\n}}\n"


def test_the_results_of_several_processes_become_one_file(tmp_path: Path) -> None:
    folder = autotune_results.folder_of(tmp_path)
    for key, process in {"a": 4711, "b": 4712}.items():
        (folder / f"autotune-0.11.2.{process}.textproto").write_text(ENTRY.format(key))
    joined = folder / "autotune-0.11.2.textproto"
    joined.write_text(ENTRY.format("c"))
    autotune_results.join(tmp_path)
    assert [*folder.iterdir()] == [joined]
    assert all(f"hlo: {key}" in joined.read_text() for key in "abc")


def test_results_that_cannot_be_joined_stay_by_themselves(tmp_path: Path) -> None:
    own = autotune_results.folder_of(tmp_path) / "autotune-0.10.2.4711.textproto"
    own.write_text("results: 3")
    autotune_results.join(tmp_path)
    assert own.read_text() == "results: 3"


def test_a_run_replays_the_joined_results_of_another_run_or_target(tmp_path: Path) -> None:
    before = autotune_results.folder_of(tmp_path / "before")
    (before / "autotune-0.11.2.textproto").write_text("chosen")
    (before / "autotune-0.11.2.4711.textproto").write_text("of a process that was killed")
    autotune_results.copy_into(tmp_path / "run", recorded_results(str(tmp_path / "before")))
    (taken,) = autotune_results.folder_of(tmp_path / "run").iterdir()
    assert (taken.name, taken.read_text()) == ("autotune-0.11.2.textproto", "chosen")
    assert recorded_results("h200")
    (before / "autotune-0.11.2.textproto").unlink()
    with pytest.raises(UsageError):
        recorded_results(str(tmp_path / "before"))


def test_results_of_another_jax_are_named(tmp_path: Path) -> None:
    assert autotune_results.mismatch(tmp_path, "0.11.2") is None
    folder = autotune_results.folder_of(tmp_path)
    (folder / "autotune-0.11.2.textproto").write_text("chosen")
    assert autotune_results.mismatch(tmp_path, "0.11.2") is None
    assert "0.11.2" in (autotune_results.mismatch(tmp_path, "0.10.2") or "")
    (folder / "autotune-0.11.2.textproto").rename(folder / "autotune-0.10.2.4711.textproto")  # not joined
    assert autotune_results.mismatch(tmp_path, "0.10.2") is None
