"""Runs put together: every record with its segment and files, or nothing."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from compare import record, selection
from compare.cli import cli
from compare.parts import part_of
from compare.record import Record, RunFolderError
from compare.selection import UsageError


def part(folder: Path, *blocks: str, suite: str = "quick", entries: bool = True) -> Path:
    """A run of xla alone, of two segments, whose records each have a graph, an archive and a timeline."""
    plan = selection.resolve(blocks, suite=suite, implementations=["xla"])
    segments = [{"id": "s1", "ceilings": f"of {folder.name}"}, {"id": "s2", "ceilings": f"again of {folder.name}"}]
    record.create(
        folder, {"schema": record.SCHEMA, "suite": suite, "target": None, "plan": plan.to_json(), "segments": segments}
    )
    for number, (case, _) in enumerate(plan.work if entries else ()):
        entry = Record(
            case=case, implementation="xla", compiler="xla", status="ok", segment=f"s{number % 2 + 1}",
            graph=f"graphs/{case.block}-{number}.json.gz", dumps=f"dumps/{case.block}-{number}.zip",
            trace={"file": f"traces/{case.block}-{number}.json.gz"},
        )
        for name in (entry.graph, entry.dumps, entry.trace["file"] if entry.trace else None):
            assert name is not None
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(f"{name} of {folder.name}")
        record.append(folder, entry)
    return folder


def test_records_keep_their_segments_and_files(tmp_path: Path) -> None:
    parts = [part(tmp_path / "a", "gelu"), part(tmp_path / "b", "softmax")]
    done = CliRunner().invoke(cli, ["merge", *map(str, parts), "--out", str(tmp_path / "out")])
    assert done.exit_code == 0 and "8 records" in done.output
    records, warnings = record.read_records(tmp_path / "out")
    assert not warnings
    ceilings = {s["id"]: s["ceilings"] for s in record.read_run(tmp_path / "out")["segments"]}
    assert list(ceilings) == ["s1", "s2", "s3", "s4"]
    for entry in records:
        owner = "a" if entry.case.block == "gelu" else "b"
        assert ceilings[str(entry.segment)].endswith(f"of {owner}")
        for name in (entry.graph, entry.dumps, (entry.trace or {})["file"]):
            assert (tmp_path / "out" / str(name)).read_text() == f"{name} of {owner}"
    before = [replace(r, segment=None) for p in parts for r in record.read_records(p)[0]]
    assert [replace(r, segment=None) for r in records] == before  # gelu is before softmax in the table, too


def test_a_merged_run_knows_what_it_is_to_hold(tmp_path: Path) -> None:
    from compare.merge import merge

    merge([part(tmp_path / "a", "gelu"), part(tmp_path / "b", "softmax")], tmp_path / "out")
    plan = selection.resolve_again(record.read_run(tmp_path / "out"), [], None)
    assert [case.id for case, _ in plan.work] == [r.case.id for r in record.read_records(tmp_path / "out")[0]]


def test_parts_of_a_plan_are_merged_in_the_order_of_the_plan(tmp_path: Path) -> None:
    """Also where each has shapes of the same block."""
    from compare.merge import merge

    whole = selection.resolve(("gelu", "softmax", "attention"), suite="quick", implementations=["xla"])
    folders = []
    for number in (3, 1, 2):
        folder, plan = tmp_path / str(number), part_of(whole, f"{number}/3")
        record.create(folder, {"schema": record.SCHEMA, "suite": "quick", "target": None, "plan": plan.to_json()})
        for case, _ in plan.work:
            record.append(folder, Record(case=case, implementation="xla", compiler="xla", status="ok"))
        folders.append(folder)
    merge(folders, tmp_path / "out")
    assert selection.resolve_again(record.read_run(tmp_path / "out"), [], None).work == whole.work
    lines = map(json.loads, (tmp_path / "out" / "records.jsonl").read_text().splitlines())
    assert [line["id"] for line in lines] == [f"{case.id}/xla" for case, _ in whole.work]


def test_a_part_named_twice_is_refused(tmp_path: Path) -> None:
    from compare.merge import merge

    folder = part(tmp_path / "a", "gelu")
    (tmp_path / "link").symlink_to(folder)
    for again in (folder, tmp_path / "a" / ".." / "a", tmp_path / "link"):
        with pytest.raises(UsageError, match="are one run: name each once"):
            merge([folder, again], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_the_autotuners_chose_is_joined(tmp_path: Path) -> None:
    from compare.merge import merge

    parts = [part(tmp_path / name, block) for name, block in (("a", "gelu"), ("b", "softmax"))]
    for number, folder in enumerate(parts):
        (folder / "target" / "xla").mkdir(parents=True)
        text = f"entries {{\n  key {{\n    hlo: {number}\n  }}\n}}\n"
        (folder / "target" / "xla" / "autotune-0.11.2.textproto").write_text(text)
        (folder / "target" / "ceilings.json").write_text(f'"{folder.name}"')
    merge(parts, tmp_path / "out")
    assert (tmp_path / "out/target/xla/autotune-0.11.2.textproto").read_text().count("entries {") == 2
    assert json.loads((tmp_path / "out/target/ceilings.json").read_text()) == "a"


def test_a_case_of_two_parts_is_refused(tmp_path: Path) -> None:
    from compare.merge import merge

    with pytest.raises(UsageError, match="gelu/llama-8b/bf16/fwd"):
        merge([part(tmp_path / "a", "gelu"), part(tmp_path / "b", "gelu", "softmax")], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_a_stopped_part_left_another_one_may_have_done(tmp_path: Path) -> None:
    from compare.merge import merge

    stopped = part(tmp_path / "a", "gelu", "softmax")
    lines = (stopped / "records.jsonl").read_text().splitlines(keepends=True)
    (stopped / "records.jsonl").write_text("".join(line for line in lines if '"block": "gelu"' in line))
    assert merge([stopped, part(tmp_path / "b", "softmax", "rmsnorm")], tmp_path / "out") == 12
    plan = selection.resolve_again(record.read_run(tmp_path / "out"), [], None)
    ids = [case.id for case, _ in plan.work]
    assert len(ids) == len(set(ids)) == 12
    records = record.read_records(tmp_path / "out")[0]
    assert {r.case.id for r in records} == set(ids)
    assert list(dict.fromkeys(r.case.block for r in records)) == ["gelu", "softmax", "rmsnorm"]  # the table's order


def test_runs_of_different_suites_are_refused(tmp_path: Path) -> None:
    from compare.merge import merge

    with pytest.raises(UsageError, match="suite 'check' and .* 'quick'"):
        merge([part(tmp_path / "a", "gelu"), part(tmp_path / "b", "softmax", suite="check")], tmp_path / "out")


def test_a_torn_part_is_refused_with_the_remedy(tmp_path: Path) -> None:
    from compare.merge import merge

    torn = part(tmp_path / "b", "softmax")
    with (torn / "records.jsonl").open("a") as file:
        file.write('{"id"')
    with pytest.raises(RunFolderError, match="--resume"):
        merge([part(tmp_path / "a", "gelu"), torn], tmp_path / "out")


def test_a_record_that_names_a_file_outside_its_run_is_refused(tmp_path: Path) -> None:
    from compare.merge import merge

    folder = part(tmp_path / "a", "gelu")
    (tmp_path / "secret").write_text("not theirs")
    entry = record.read_records(folder)[0][0]
    record.append(folder, replace(entry, graph="../secret"))
    with pytest.raises(RunFolderError, match="outside its run"):
        merge([folder, part(tmp_path / "b", "softmax")], tmp_path / "out")


def test_an_existing_folder_is_left_alone(tmp_path: Path) -> None:
    folder = part(tmp_path / "a", "gelu")
    done = CliRunner().invoke(cli, ["merge", str(folder), "--out", str(folder)])
    assert done.exit_code == 2 and "exists already" in done.output
