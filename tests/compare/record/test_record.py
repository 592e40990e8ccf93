"""Run folders: records survive writing and reading, and malformed ones are named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from xlafuse.compare.base.usage import UsageError
from xlafuse.compare.record import run_folder
from xlafuse.compare.record.record import SCHEMA, Record
from xlafuse.compare.record.run_folder import RunFolderError
from xlafuse.compare.sources import graph_sources
from xlafuse.compare.spec.blocks import BLOCKS


def entry(implementation: str = "xla", status: str = "ok") -> Record:
    case = BLOCKS["gelu"].cases("quick")[0]
    return Record(case=case, implementation=implementation, compiler="xla", status=status, compile_s=1.5)


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
TIMED: dict[str, Any] = {"timer": "cupti", "parts": {"forward": TIMES}, "wall_time": [1e-4] * 5}


def timed_by(device_time: object) -> dict[str, Any]:
    return TIMED | {"parts": {"forward": TIMES | {"device_time": device_time}}}


def written(folder: Path, **change: Any) -> tuple[list[Record], list[str]]:
    data = json.loads(json.dumps(entry().to_json())) | change
    (folder / "records.jsonl").write_text(json.dumps(data) + "\n")
    return run_folder.read_records(folder)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"schema": 1}, "schema 1"),
        ({"status": "splendid"}, "splendid"),
        ({"case": {"block": "gelu"}}, "misnamed"),
        ({"case": 3}, "misnamed"),
        ({"implementation": 3}, "implementation: expected str"),
        ({"compile_s": "soon"}, "compile_s: expected"),
        ({"errors": [{}]}, "errors[0].name: missing"),
        ({"kernels": {"forward": "none"}}, "kernels.forward: expected an object"),
        ({"measurement": [1]}, "measurement: expected an object"),
        ({"measurement": timed_by("soon")}, "measurement.parts.forward.device_time: expected a list"),
        ({"measurement": timed_by([[]])}, "no sample"),
        ({"measurement": timed_by([[0.0]])}, "not positive"),
        ({"measurement": TIMED | {"wall_time": [0.0]}}, "not positive"),
        ({"measurement": TIMED | {"processes": [0]}}, "processes"),
        ({"measurement": TIMED | {"modes": {"warm": {"parts": 3}}}}, "modes.warm.parts: expected an object"),
        ({"traffic": {"call": {"cache_control": "all", "parts": {"forward": {}}}}}, "traffic.call.parts.forward"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_malformed_record_is_skipped_and_its_field_named(tmp_path: Path, change: dict[str, Any], reason: str) -> None:
    records, warnings = written(tmp_path, **change)
    assert not records and reason in warnings[0]


def test_records_of_older_versions_get_the_names_of_today(tmp_path: Path) -> None:
    roofline = {"floor_us": 2.0, "recoverable_us": 1.0, "bound_us": {"memory": 3.0}}
    kernels = {"forward": {"launches": 1, "bytes_moved": 8, "provenance": {}, "roofline": roofline}}
    modes = {"launches": {"same_as": "cold"}, "graph": {"unavailable": "no capture"}}
    (record,), warnings = written(tmp_path, kernels=kernels, measurement=TIMED | {"modes": modes})
    assert not warnings and record.measurement
    assert record.kernels["forward"]["bytes_declared"] == 8
    assert record.kernels["forward"]["roofline"]["roofline_time_us"] == 2.0
    assert set(record.measurement["modes"]) == {"no-graph", "graph"}


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


@pytest.mark.parametrize("schema", [3, 99])
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


@pytest.mark.parametrize("name", ["fusion-graph", "explained"])
def test_a_later_schema_of_a_graph_is_refused(tmp_path: Path, name: str) -> None:
    file = tmp_path / "folder" / "graph.json"
    file.parent.mkdir()
    file.write_text(json.dumps({"schema": f"xlafuse.{name}/99", "name": "f", "compiler": "xla", "kernels": []}))
    for path in (file, *([file.parent] if name == "fusion-graph" else [])):
        with pytest.raises(UsageError, match=f"xlafuse.{name}/1', got 'xlafuse.{name}/99': use the xlafuse that"):
            graph_sources.contents(path).graphs[0].graph()
