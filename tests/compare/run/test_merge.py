"""Runs put together: every record with its segment and files, or nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from commands import xlafuse
from made_records import made_record, with_fields

from xlafuse.compare.base.usage import UsageError
from xlafuse.compare.plan import selection
from xlafuse.compare.plan.plan import Plan
from xlafuse.compare.record import run_folder
from xlafuse.compare.record.record import SCHEMA
from xlafuse.compare.record.run_files import recorded_file
from xlafuse.compare.record.run_folder import RunFolderError
from xlafuse.compare.run.merge import merge
from xlafuse.compare.run.shards import shard_of
from xlafuse.compare.spec.implementation import OwnFunction

SHARED = ("gelu", "softmax", "attention")


def part(folder: Path, *blocks: str, suite: str = "quick", entries: bool = True) -> Path:
    """A run of xla alone, of two segments, whose records each have a graph, an archive and a timeline."""
    plan = selection.resolve(blocks, suite=suite, implementations=["xla"])
    segments = [{"id": "s1", "ceilings": f"of {folder.name}"}, {"id": "s2", "ceilings": f"again of {folder.name}"}]
    run_folder.create(
        folder, {"schema": SCHEMA, "suite": suite, "target": None, "plan": plan.to_json(), "segments": segments}
    )
    for number, (case, _) in enumerate(plan.work if entries else ()):
        entry = made_record(
            case=case, implementation="xla", compiler="xla", status="ok", segment=f"s{number % 2 + 1}",
            graph=f"graphs/{case.block}-{number}.json.gz", dumps=f"dumps/{case.block}-{number}.zip",
            trace={"file": f"traces/{case.block}-{number}.json.gz"},
        )
        for name in (entry.graph, entry.dumps, entry.trace and entry.trace.file):
            assert name is not None
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(f"{name} of {folder.name}")
        run_folder.append(folder, entry)
    return folder


def test_records_keep_their_segments_and_files(tmp_path: Path) -> None:
    parts = [part(tmp_path / "a", "gelu"), part(tmp_path / "b", "softmax")]
    done = xlafuse("merge", *parts, "--out", tmp_path / "out")
    assert done.exit_code == 0
    records, warnings = run_folder.read_records(tmp_path / "out")
    assert not warnings and f"{len(records)} records" in done.output
    ceilings = {s["id"]: s["ceilings"] for s in run_folder.read_run(tmp_path / "out")["segments"]}
    assert list(ceilings) == ["s1", "s2", "s3", "s4"]
    for entry in records:
        owner = "a" if entry.case.block == "gelu" else "b"
        assert ceilings[str(entry.segment)].endswith(f"of {owner}")
        for name in (entry.graph, entry.dumps, entry.trace and entry.trace.file):
            assert recorded_file(tmp_path / "out", entry, str(name)).read_bytes() == f"{name} of {owner}".encode()
    before = [with_fields(r, segment=None) for p in parts for r in run_folder.read_records(p)[0]]
    assert [with_fields(r, segment=None) for r in records] == before  # gelu is before softmax in the table, too
    plan = selection.resolve_again(run_folder.read_run(tmp_path / "out"), [], None)
    assert [case.id for case, _ in plan.work] == [record.case.id for record in records]


def test_a_run_that_went_on_elsewhere_keeps_the_files_of_each_stretch(tmp_path: Path) -> None:
    """Its second stretch had no more of the first than run.json and the records, and made one record anew."""
    first = part(tmp_path / "a", "gelu", "softmax")
    run = run_folder.read_run(first) | {"created": "2026-11-29T08:00:00+00:00"}
    run_folder.write_run(first, run)
    again, *others = run_folder.read_records(first)[0]
    second = tmp_path / "b"
    run_folder.create(second, run | {"segments": [*run["segments"], {"id": "s3", "ceilings": "of b"}]})
    for entry in others:
        run_folder.append(second, entry)
    run_folder.append(second, with_fields(again, segment="s3", dumps=None))
    (second / "graphs").mkdir()
    (second / str(again.graph)).write_text("of b")
    for folders in ([first, second], [second, first]):
        out = tmp_path / f"whole-{folders[0].name}"
        assert merge([*folders, part(tmp_path / out.name / "other", "rmsnorm")], out / "out")[1] == 0
        records = {record.id: record for record in run_folder.read_records(out / "out")[0]}
        assert {s["ceilings"] for s in run_folder.read_run(out / "out")["segments"]} >= {"of a", "again of a", "of b"}
        for entry in others:
            for name in (entry.graph, entry.dumps, entry.trace and entry.trace.file):
                kept = recorded_file(out / "out", records[entry.id], str(name))
                assert kept.read_bytes() == f"{name} of a".encode()
        made = records[again.id]
        assert made.dumps is None and recorded_file(out / "out", made, str(made.graph)).read_bytes() == b"of b"


def shared_out(folder: Path, *numbers: int, of: int = 3, blocks: tuple[str, ...] = SHARED) -> list[Path]:
    """Runs of xla alone of these parts of the blocks' quick suite."""
    whole = selection.resolve(blocks, suite="quick", implementations=["xla"])
    folders = [folder / f"{blocks[0]}-{number}-{of}" for number in numbers]
    for number, made in zip(numbers, folders, strict=True):
        plan = shard_of(whole, f"{number}/{of}")
        run_folder.create(made, {"schema": SCHEMA, "suite": "quick", "target": None, "plan": plan.to_json()})
        for case, _ in plan.work:
            run_folder.append(made, made_record(case=case, implementation="xla", compiler="xla", status="ok"))
    return folders


def test_parts_of_a_plan_are_merged_in_the_order_of_the_plan(tmp_path: Path) -> None:
    """Also where each has shapes of the same block."""
    whole = selection.resolve(SHARED, suite="quick", implementations=["xla"])
    merge(shared_out(tmp_path, 3, 1, 2), tmp_path / "out")
    assert selection.resolve_again(run_folder.read_run(tmp_path / "out"), [], None).work == whole.work
    records = run_folder.read_records(tmp_path / "out")[0]
    assert [each.id for each in records] == [f"{case.id}/xla" for case, _ in whole.work]


def test_a_missing_part_is_refused_by_name(tmp_path: Path) -> None:
    folders = shared_out(tmp_path, 1, 3)
    done = xlafuse("merge", *folders, "--out", tmp_path / "out")
    lost = shard_of(selection.resolve(SHARED, suite="quick", implementations=["xla"]), "2/3").work
    assert done.exit_code == 2 and not (tmp_path / "out").exists()
    assert f"shard 2/3 missing: {len(lost)} cases" in done.output and lost[0][0].id in done.output
    assert "--partial" in done.output
    with pytest.raises(UsageError, match=r"1/4, 3/4, 4/4 missing"):
        merge(shared_out(tmp_path, 2, of=4), tmp_path / "out")


def test_a_missing_part_of_another_selection_is_refused(tmp_path: Path) -> None:
    """Parts 1/2 and 2/2 are there, of two selections."""
    folders = [
        *shared_out(tmp_path, 1, of=2, blocks=("gelu",)), *shared_out(tmp_path, 2, of=2, blocks=("softmax", "rmsnorm"))
    ]
    with pytest.raises(UsageError, match=r"such as gelu/.*, in none of these runs"):
        merge(folders, tmp_path / "out")


def test_a_partial_merge_is_known_as_one_until_the_rest_joins(tmp_path: Path) -> None:
    first, second, third = shared_out(tmp_path, 1, 2, 3)
    assert xlafuse("merge", first, third, "--partial", "--out", tmp_path / "some").exit_code == 0
    assert run_folder.read_run(tmp_path / "some")["plan"]["shard"]["names"] == ["1/3", "3/3"]
    with pytest.raises(UsageError, match="2/3 missing"):
        merge([tmp_path / "some"], tmp_path / "all")
    every = len(selection.resolve(SHARED, suite="quick").work)
    assert merge([tmp_path / "some", second], tmp_path / "all") == (every, 0)
    assert "shard" not in run_folder.read_run(tmp_path / "all")["plan"]


def test_what_a_missing_part_was_to_do_may_be_of_another_run(tmp_path: Path) -> None:
    """Two GPUs' parts, and what the third's machine lost done again by name."""
    first, lost, third = shared_out(tmp_path, 1, 2, 3)
    run = run_folder.read_run(lost)
    del run["plan"]["shard"]
    run_folder.write_run(lost, run)
    assert merge([first, lost, third], tmp_path / "out")
    assert "shard" not in run_folder.read_run(tmp_path / "out")["plan"]


def test_more_parts_than_shapes_are_no_missing_ones(tmp_path: Path) -> None:
    assert merge(shared_out(tmp_path, 1, 2, 3, 4, 5, 6, of=9, blocks=("gelu", "softmax")), tmp_path / "out")


def test_a_part_named_twice_is_refused(tmp_path: Path) -> None:
    folder = part(tmp_path / "a", "gelu")
    (tmp_path / "link").symlink_to(folder)
    for again in (folder, tmp_path / "a" / ".." / "a", tmp_path / "link"):
        with pytest.raises(UsageError, match="name each once"):
            merge([folder, again], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_the_autotuners_chose_is_joined(tmp_path: Path) -> None:
    parts = [part(tmp_path / name, block) for name, block in (("a", "gelu"), ("b", "softmax"))]
    for number, folder in enumerate(parts):
        (folder / "target" / "xla").mkdir(parents=True)
        text = f"entries {{\n  key {{\n    hlo: {number}\n  }}\n}}\n"
        (folder / "target" / "xla" / "autotune-0.11.2.textproto").write_text(text)
        (folder / "target" / "ceilings.json").write_text(f'"{folder.name}"')
    merge(parts, tmp_path / "out")
    assert (tmp_path / "out/target/xla/autotune-0.11.2.textproto").read_text().count("entries {") == 2
    assert json.loads((tmp_path / "out/target/ceilings.json").read_text()) == "a"


@pytest.mark.parametrize(
    ("blocks", "options", "complaint"),
    [
        (("gelu", "softmax"), {}, "gelu/llama-8b/bf16/fwd"),
        (("softmax",), {"suite": "check"}, "suite 'check' and .* 'quick'"),
        (("softmax",), {"entries": False}, "no record was written yet; --out .*/b --resume"),
    ],
    ids=["a case of two parts", "different suites", "no records"],
)
def test_parts_that_do_not_go_together_are_refused(
    tmp_path: Path, blocks: tuple[str, ...], options: dict[str, Any], complaint: str
) -> None:
    with pytest.raises((UsageError, RunFolderError), match=complaint):
        merge([part(tmp_path / "a", "gelu"), part(tmp_path / "b", *blocks, **options)], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_a_stopped_part_left_another_one_may_have_done(tmp_path: Path) -> None:
    stopped = part(tmp_path / "a", "gelu", "softmax")
    lines = (stopped / "records.jsonl").read_text().splitlines(keepends=True)
    (stopped / "records.jsonl").write_text("".join(line for line in lines if '"block": "gelu"' in line))
    assert merge([stopped, part(tmp_path / "b", "softmax", "rmsnorm")], tmp_path / "out") == (18, 0)
    done = xlafuse("merge", stopped, "--out", tmp_path / "alone")
    assert done.exit_code == 0 and "6 planned records" in done.stderr
    plan = selection.resolve_again(run_folder.read_run(tmp_path / "out"), [], None)
    ids = [case.id for case, _ in plan.work]
    assert len(ids) == len(set(ids)) == 18
    records = run_folder.read_records(tmp_path / "out")[0]
    assert {r.case.id for r in records} == set(ids)
    assert list(dict.fromkeys(r.case.block for r in records)) == ["gelu", "softmax", "rmsnorm"]  # the table's order


def test_runs_of_different_programs_are_refused(tmp_path: Path) -> None:
    parts = [part(tmp_path / "a", "gelu"), part(tmp_path / "b", "softmax")]
    for folder, commit in zip(parts, ("1" * 40, "2" * 40), strict=True):
        run_folder.write_run(folder, {**run_folder.read_run(folder), "commit": commit, "sources": commit})
    with pytest.raises(UsageError, match="commit 2{12} and .* commit 1{12}"):
        merge(parts, tmp_path / "out")


def test_a_torn_line_costs_a_warning_where_every_record_is_there(tmp_path: Path) -> None:
    torn = part(tmp_path / "b", "softmax")
    with (torn / "records.jsonl").open("a") as file:
        file.write('{"id"')
    sound = part(tmp_path / "a", "gelu")
    warnings: list[str] = []
    assert merge([sound, torn], tmp_path / "out", warn=warnings.extend)[1] == 0
    assert len(warnings) == 1


def test_a_line_that_cannot_be_read_costs_nothing_once_its_record_is_made_anew(tmp_path: Path) -> None:
    """A resumed run appends the records that it makes again, and mends only the last line."""
    broken, other = part(tmp_path / "b", "softmax"), part(tmp_path / "a", "gelu")
    lines = (broken / "records.jsonl").read_text().splitlines(keepends=True)
    (broken / "records.jsonl").write_text("".join([*lines[:2], lines[2][:50] + "\n", *lines[3:]]))
    with pytest.raises(RunFolderError, match=r"records.jsonl:3: .*; --out .*/b --resume"):
        merge([other, broken], tmp_path / "out")
    assert run_folder.repair(broken) is None and not (tmp_path / "out").exists()
    rest = part(tmp_path / "c", "softmax")  # or made by a part that does what this one left
    left_out: list[str] = []
    (broken / "records.jsonl").write_text("".join([*lines[:1], lines[1][:50] + "\n"]))
    (rest / "records.jsonl").write_text("".join(lines[1:]))
    assert merge([other, broken, rest], tmp_path / "three", warn=left_out.extend) == (12, 0) and len(left_out) == 1
    (broken / "records.jsonl").write_text("".join([*lines[:2], lines[2][:50] + "\n", *lines[3:]]))
    with (broken / "records.jsonl").open("a") as file:
        file.write(lines[2])
    done = xlafuse("merge", other, broken, "--out", tmp_path / "out")
    assert done.exit_code == 0 and "records.jsonl:3: line skipped" in done.stderr and "12 records" in done.output
    records, warnings = run_folder.read_records(tmp_path / "out")
    assert len(records) == 12 and not warnings


def test_a_part_of_another_schema_is_for_the_version_that_wrote_it(tmp_path: Path) -> None:
    """No --resume of this version makes its records readable."""
    folder = part(tmp_path / "a", "gelu")
    lines = (folder / "records.jsonl").read_text().replace(f'"schema": {SCHEMA}', '"schema": 1')
    (folder / "records.jsonl").write_text(lines)
    run_folder.write_run(folder, run_folder.read_run(folder) | {"schema": 1, "xlafuse": "0.1.0"})
    with pytest.raises(RunFolderError, match="schema 1, .* 3: use xlafuse 0.1.0$"):
        merge([folder], tmp_path / "out")


def test_a_record_that_names_a_file_outside_its_run_is_refused(tmp_path: Path) -> None:
    folder = part(tmp_path / "a", "gelu")
    (tmp_path / "secret").write_text("not theirs")
    entry = run_folder.read_records(folder)[0][0]
    run_folder.append(folder, with_fields(entry, graph="../secret"))
    with pytest.raises(RunFolderError, match="outside its run"):
        merge([folder, part(tmp_path / "b", "softmax")], tmp_path / "out")


def test_an_existing_folder_is_left_alone(tmp_path: Path) -> None:
    folder = part(tmp_path / "a", "gelu")
    done = xlafuse("merge", folder, "--out", folder)
    assert done.exit_code == 2 and "exists already" in done.output


def with_function(folder: Path, block: str, name: str, content: str) -> Path:
    own = OwnFunction(block, "torch", f"{folder}/mine.py:{name}", sources=((f"{folder}/mine.py", content),))
    plan = selection.resolve([block], suite="tour", implementations=["xla", name], own=[own])
    again = [{"case": block, "reason": "noise"}]
    made = {"schema": SCHEMA, "suite": "tour", "target": None, "plan": plan.to_json(), "again": again}
    run_folder.create(folder, made)
    for case, found in plan.work:
        for row in found:
            run_folder.append(folder, made_record(case=case, implementation=row.name, compiler=row.backend_name))
    return folder


def test_functions_and_repeated_cases_of_all_runs_are_kept(tmp_path: Path) -> None:
    named = (("a", "gelu", "mine", "1"), ("b", "softmax", "mine", "2"), ("c", "rmsnorm", "norm", "1"))
    merge([with_function(tmp_path / folder, *rest) for folder, *rest in named], tmp_path / "out")
    run = run_folder.read_run(tmp_path / "out")
    plan = Plan.from_json(run["plan"])
    assert [(own.block, own.name) for own in plan.own] == [(block, name) for _, block, name, _ in named]
    assert plan.record_ids == {record.id for record in run_folder.read_records(tmp_path / "out")[0]}
    assert [entry["case"] for entry in run["again"]] == ["gelu", "softmax", "rmsnorm"]


@pytest.mark.parametrize("content", ["1", "2"])
def test_runs_of_one_function_are_merged_wherever_its_file_is(tmp_path: Path, content: str) -> None:
    runs = [with_function(tmp_path / "a", "gelu", "mine", "1"), with_function(tmp_path / "b", "gelu", "mine", content)]
    (runs[1] / "records.jsonl").write_text("")
    if content == "1":
        merge(runs, tmp_path / "out")
    else:
        with pytest.raises(UsageError, match="mine.py:mine"):
            merge(runs, tmp_path / "out")
