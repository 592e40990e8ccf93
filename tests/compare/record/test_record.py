"""Run folders: what is written is read, and what is broken is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from compare.record import run_folder
from compare.record.record import Record
from compare.record.run_folder import RunFolderError
from compare.spec.blocks import BLOCKS


def entry(implementation: str = "xla", status: str = "ok") -> Record:
    case = BLOCKS["gelu"].cases("quick")[0]
    return Record(case=case, implementation=implementation, compiler="xla", status=status, compile_s=1.5)


def test_records_come_back(tmp_path: Path) -> None:
    run_folder.create(tmp_path, {"suite": "quick"})
    for name in ("xla", "eager"):
        run_folder.append(tmp_path, entry(name))
    records, warnings = run_folder.read_records(tmp_path)
    assert records == [entry("xla"), entry("eager")] and not warnings
    assert run_folder.read_run(tmp_path) == {"suite": "quick"}


def test_the_newest_record_of_an_id_stands(tmp_path: Path) -> None:
    for status in ("failed", "ok"):
        run_folder.append(tmp_path, entry(status=status))
    records, _ = run_folder.read_records(tmp_path)
    assert [r.status for r in records] == ["ok"]


def test_a_torn_line_costs_itself_alone(tmp_path: Path) -> None:
    run_folder.append(tmp_path, entry("xla"))
    with (tmp_path / "records.jsonl").open("a") as file:
        file.write('{"id": "gelu/torn')
    run_folder.append(tmp_path, entry("eager"))
    records, warnings = run_folder.read_records(tmp_path)
    assert [r.implementation for r in records] == ["xla", "eager"]
    assert len(warnings) == 1 and "records.jsonl:2" in warnings[0]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"schema": 99}, "schema 99"),
        ({"status": "splendid"}, "splendid"),
        ({"case": {"block": "gelu"}}, "misnamed"),
        ({"case": 3}, "misnamed"),
        ({"implementation": 3}, "implementation: expected str"),
    ],
)
def test_a_record_of_another_shape_is_named(tmp_path: Path, change: dict[str, object], reason: str) -> None:
    data = json.loads(json.dumps(entry().to_json())) | change
    (tmp_path / "records.jsonl").write_text(json.dumps(data) + "\n")
    records, warnings = run_folder.read_records(tmp_path)
    assert not records and reason in warnings[0]


def test_what_is_no_run_folder_says_so(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="no such run folder"):
        run_folder.read_run(tmp_path / "none")
    with pytest.raises(RunFolderError, match="run.json: missing"):
        run_folder.read_run(tmp_path)
    (tmp_path / "run.json").write_text('{"half')
    with pytest.raises(RunFolderError, match="cannot be read"):
        run_folder.read_run(tmp_path)
    with pytest.raises(RunFolderError, match=r"run\.json: a file; expected a run's folder, the one that holds"):
        run_folder.read_run(tmp_path / "run.json")
