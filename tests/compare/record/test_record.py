"""Run folders: records survive writing and reading, and malformed ones are named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from made_records import made_record

from xlafuse.compare.base.usage import UsageError
from xlafuse.compare.graph import store
from xlafuse.compare.record import run_folder
from xlafuse.compare.record.record import SCHEMA, Record
from xlafuse.compare.record.record_fields import Measurement
from xlafuse.compare.record.run_folder import RunFolderError
from xlafuse.compare.sources import explained
from xlafuse.compare.sources.opening import open_source
from xlafuse.compare.spec.blocks import BLOCKS


def entry(implementation: str = "xla", status: str = "ok") -> Record:
    case = BLOCKS["gelu"].cases("quick")[0]
    return made_record(case, implementation, status=status, compile_s=1.5)


def test_records_survive_writing_and_reading(tmp_path: Path) -> None:
    run_folder.create(tmp_path, {"suite": "quick"})
    for name in ("xla", "eager"):
        run_folder.append(tmp_path, entry(name))
    records, warnings = run_folder.read_records(tmp_path)
    assert records == [entry("xla"), entry("eager")] and not warnings
    assert run_folder.read_run(tmp_path) == {"suite": "quick"}


def test_the_newest_record_of_an_id_counts(tmp_path: Path) -> None:
    for status in ("failed", "ok"):
        run_folder.append(tmp_path, entry(status=status))
    records, _ = run_folder.read_records(tmp_path)
    assert [r.status for r in records] == ["ok"]


def test_a_partial_line_costs_only_its_own_record(tmp_path: Path) -> None:
    run_folder.append(tmp_path, entry("xla"))
    with (tmp_path / "records.jsonl").open("a") as file:
        file.write('{"id": "gelu/torn')
    run_folder.append(tmp_path, entry("eager"))
    records, warnings = run_folder.read_records(tmp_path)
    assert [r.implementation for r in records] == ["xla", "eager"]
    assert len(warnings) == 1 and "records.jsonl:2" in warnings[0]


TIMES: dict[str, Any] = {"device_time": [[1e-4, 2e-4]] * 5, "busy_time": None, "launches": None}
TIMED: dict[str, Any] = {"timer": "cupti", "phases": {"forward": TIMES}, "wall_time": [1e-4] * 5}


def timed_by(device_time: object) -> dict[str, Any]:
    return TIMED | {"phases": {"forward": TIMES | {"device_time": device_time}}}


def written(folder: Path, **change: Any) -> tuple[list[Record], list[str]]:
    data = json.loads(json.dumps(entry().to_json())) | change
    (folder / "records.jsonl").write_text(json.dumps(data) + "\n")
    return run_folder.read_records(folder)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"schema": 2}, "schema 2, expected 3"),
        ({"status": "splendid"}, "splendid"),
        ({"case": {"block": "gelu"}}, "field `name` - at `$.case`"),
        ({"case": 3}, "$.case"),
        ({"implementation": 3}, "Expected `str`, got `int` - at `$.implementation`"),
        ({"compile_s": "soon"}, "$.compile_s"),
        ({"errors": [{}]}, "field `name` - at `$.errors[0]`"),
        ({"kernels": {"forward": "none"}}, "$.kernels"),
        ({"measurement": [1]}, "$.measurement"),
        ({"measurement": timed_by("soon")}, "phases[...].device_time"),
        ({"measurement": timed_by([[]])}, "no sample"),
        ({"measurement": timed_by([[0.0]])}, "not positive"),
        ({"measurement": TIMED | {"wall_time": [0.0]}}, "not positive"),
        ({"measurement": TIMED | {"processes": [0]}}, "processes"),
        ({"measurement": TIMED | {"modes": {"warm": {"phases": 3}}}}, "$.measurement.modes[...].phases"),
        ({"case": entry().to_json()["case"] | {"dtype": "float7"}}, "unknown dtype 'float7'"),
        ({"checked": None}, "status ok needs `checked`"),
        ({"errors": []}, "status ok needs"),
        ({"status": "failed"}, "status failed needs a reason"),
        ({"status": "wrong", "detail": ""}, "status wrong needs a reason"),
        ({"recorded": {}}, "one of device_time_us, unavailable"),
        ({"trace": {"file": "traces/x.json.gz", "unavailable": "the worker died"}}, "one of file, unavailable"),
        ({"measurement": TIMED | {"modes": {"warm": {}}}}, "one of phases, same_as, unavailable"),
        ({"traffic": {"call": {"cache_control": "all", "phases": {"forward": {}}}}}, "$.traffic[...].phases[...]"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_malformed_record_is_skipped_and_its_field_named(tmp_path: Path, change: dict[str, Any], reason: str) -> None:
    records, warnings = written(tmp_path, **change)
    assert not records and reason in warnings[0]


def test_a_field_of_a_default_value_is_left_out() -> None:
    record = entry()
    assert "measurement" not in record.to_json()
    record.measurement = Measurement(timer=None, phases=None, wall_time=[1e-4])
    assert record.to_json()["measurement"] == {"timer": None, "phases": None, "wall_time": [1e-4]}
    assert Record.from_json(json.loads(json.dumps(record.to_json()))) == record


def test_other_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="no such run folder"):
        run_folder.read_run(tmp_path / "none")
    with pytest.raises(RunFolderError, match="run.json: missing"):
        run_folder.read_run(tmp_path)
    (tmp_path / "run.json").write_text('{"half')
    with pytest.raises(RunFolderError, match="cannot be read"):
        run_folder.read_run(tmp_path)
    with pytest.raises(RunFolderError, match=r"run\.json: a file; expected a run's folder, the one that holds"):
        run_folder.read_run(tmp_path / "run.json")


@pytest.mark.parametrize("schema", [SCHEMA + 1, 99])
def test_a_later_schema_is_refused_and_kept(tmp_path: Path, schema: int) -> None:
    """The message says which schema came, which is read and what to do; a resumed run keeps such records."""
    run_folder.create(tmp_path, {"schema": SCHEMA})
    said = f"schema {schema}, and this version reads {SCHEMA}: use "
    for end in ("\n", ""):
        (tmp_path / "records.jsonl").write_text(json.dumps(entry().to_json() | {"schema": schema}) + end)
        before = (tmp_path / "records.jsonl").read_bytes()
        with pytest.raises(RunFolderError, match=f"records.jsonl:1: {said}"):
            run_folder.read_records(tmp_path)
        if not end:
            with pytest.raises(RunFolderError, match=said):
                run_folder.repair(tmp_path)
        assert (tmp_path / "records.jsonl").read_bytes() == before
    run_folder.write_run(tmp_path, {"schema": schema, "xlafuse": "9.9"})
    with pytest.raises(RunFolderError, match=f"run.json: {said}xlafuse 9.9"):
        run_folder.read_run(tmp_path)


@pytest.mark.parametrize("schema", [store.SCHEMA, explained.SCHEMA])
def test_another_schema_of_a_graph_is_refused(tmp_path: Path, schema: str) -> None:
    name, _, version = schema.rpartition("/")
    file = tmp_path / "folder" / "graph.json"
    file.parent.mkdir()
    file.write_text(json.dumps({"schema": f"{name}/99", "name": "f", "compiler": "xla", "kernels": []}))
    for path in (file, *([file.parent] if schema == store.SCHEMA else [])):
        with pytest.raises(UsageError, match=f"{name}/{version}', got '{name}/99': use the xlafuse that"):
            open_source(path).results[0].load()
