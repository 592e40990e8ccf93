"""A run is of one program; another one measures a case of it anew only by name, with a reason."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner
from made_records import made_record

from xlafuse.compare.base import program
from xlafuse.compare.base.usage import UsageError
from xlafuse.compare.cli.main import cli
from xlafuse.compare.plan import selection
from xlafuse.compare.plan.plan import Plan
from xlafuse.compare.record import run_folder
from xlafuse.compare.record.record import SCHEMA, Record
from xlafuse.compare.record.run_folder import RunFolderError
from xlafuse.compare.run import run
from xlafuse.compare.run.session import Session


@pytest.mark.parametrize("commit", ["1" * 40, None])
def test_another_program_does_not_resume_a_run(tmp_path: Path, commit: str | None) -> None:
    plan = selection.resolve(["gelu"], suite="tour", implementations=["xla"])
    made = {"schema": SCHEMA, "target": "h200", "plan": plan.to_json(), "segments": []}
    run_folder.create(tmp_path, {**made, "commit": commit, "dirty": False, "sources": "2" * 64})
    with pytest.raises(RunFolderError, match="commit 1{12}, and this" if commit else "sources 2{12}, and this"):
        run.execute(plan, folder=tmp_path, target="h200", resume=True)
    assert program.describe()["sources"] != "2" * 64


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Ids of the records that runs for a target make, in order; all compile at once."""
    made: list[str] = []

    def compile_all(plan: Plan, session: Session) -> None:
        session.begin_segment({}, None)
        for case, found in plan.work:
            for row in session.pending(case, found):
                named = {"implementation": row.name, "compiler": row.backend_name}
                session.write(made_record(case=case, status="compiled", segment=session.segment, **named))
                made.append(f"{case.block} {row.name}")

    monkeypatch.setattr(run.for_target, "run", compile_all)
    return made


def xlafuse(*words: object, code: int = 0) -> str:
    done = CliRunner().invoke(cli, ["run", *map(str, words)])
    assert done.exit_code == code, (done.output, done.exception)
    return done.output


OWN = ("gelu", "--suite", "tour", "-i", "xla", "--target", "h200", "--with")


@pytest.mark.parametrize(
    "change",
    [
        lambda file: file.write_text("import torch\ndef mine(x): return torch.tanh(x) / 2\n"),
        lambda file: file.unlink(),
    ],
    ids=["changed", "gone"],
)
@pytest.mark.parametrize("named", [(), ("--with-backward", "mine.py:gradient")])
@pytest.mark.parametrize("later", [False, True])
def test_a_changed_function_does_not_resume_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: list[str], change: Callable[[Path], object],
    named: Sequence[str], later: bool,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    file = tmp_path / "mine.py"
    file.write_text("import torch\ndef mine(x): return torch.tanh(x)\ndef gradient(d_y): return d_y\n")
    if later:
        xlafuse("softmax", "--suite", "tour", "-i", "xla", "--target", "h200", "--out", "run")
    xlafuse(*OWN, "mine.py:mine", *named, "--out", "run", *(["--resume"] if later else []))
    assert compiled[-1] == "gelu mine"
    assert "already has" in xlafuse("--out", "run", "--resume")
    change(file)
    assert "mine.py" in xlafuse("--out", "run", "--resume", code=2)


def test_another_function_of_the_same_name_is_no_row_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name, body in (("one", "torch.tanh(x)"), ("two", "torch.tanh(x) / 2"), ("copy_of_one", "torch.tanh(x)")):
        (tmp_path / f"{name}.py").write_text(f"import torch\ndef mine(x): return {body}\n")
        monkeypatch.delitem(sys.modules, name, raising=False)
    xlafuse(*OWN, "one.py:mine", "--out", "run")
    assert "two.py" in xlafuse(*OWN, "two.py:mine", "--out", "run", "--resume", code=2)
    assert "already has" in xlafuse(*OWN, "copy_of_one.py:mine", "--out", "run", "--resume")


def test_a_case_measured_anew_keeps_its_reason_and_its_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = selection.resolve(["gelu", "softmax"], suite="tour", implementations=["xla"])
    made = {"schema": SCHEMA, "suite": "tour", "target": "h200", "plan": whole.to_json(), "segments": []}
    run_folder.create(tmp_path, {**made, "commit": "1" * 40, "dirty": False, "sources": "2" * 64})
    cases = [case for case, _ in whole.work]
    for case in cases:
        run_folder.append(tmp_path, made_record(case=case, implementation="xla", compiler="xla", status="compiled"))
    plan, reasons = selection.repeated(run_folder.read_run(tmp_path), [f"{cases[0].id}=a = b"])
    assert [case.id for case, _ in plan.work] == [cases[0].id] and reasons == {cases[0].id: "a = b"}
    ran: list[list[str]] = []

    def compile_all(plan: Plan, session: Session) -> None:
        ran.append([case.id for case, found in plan.work if session.pending(case, found)])
        for case, _ in plan.work:
            session.write(made_record(case=case, implementation="xla", compiler="xla", status="compiled", detail="new"))

    monkeypatch.setattr(run.for_target, "run", compile_all)
    assert run.execute(plan, folder=tmp_path, target="h200", resume=True, again=reasons) == 0
    assert ran == [[cases[0].id]]
    records = {record.case.id: record for record in run_folder.read_records(tmp_path)[0]}
    assert [records[case.id].detail for case in cases].count("new") == 1 and records[cases[0].id].detail == "new"
    said = (tmp_path / "README.md").read_text()
    assert f"{cases[0].id}: a = b" in said and program.in_words(program.describe()) in said


def test_the_command_replaces_the_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = selection.resolve(["gelu"], suite="tour", implementations=["xla"])
    run_folder.create(tmp_path, {"schema": SCHEMA, "suite": "tour", "target": "h200", "plan": plan.to_json()})
    case = plan.work[0][0]
    run_folder.append(tmp_path, made_record(case=case, implementation="xla", compiler="xla", status="compiled"))

    def compile_all(plan: Plan, session: Session) -> None:
        session.write(made_record(case=case, implementation="xla", compiler="xla", status="compiled", detail="new"))

    monkeypatch.setattr(run.for_target, "run", compile_all)
    done = CliRunner().invoke(cli, ["run", "--out", str(tmp_path), "--again", f"{case.id}=why"])
    assert done.exit_code == 0, done.output
    (record,) = run_folder.read_records(tmp_path)[0]
    assert record.detail == "new" and "why" in (tmp_path / "README.md").read_text()


@pytest.mark.parametrize(
    "words",
    [
        ["--again", "a=b"],
        *(
            ["--again", "a=b", "--out", ".", *more] for more in (
                ["gelu"], ["--target", "h200"], ["--shard", "1/2"], ["--mode", "warm"], ["--restarts", "0"],
                ["--xla-autotune-from", "h200"], ["--suite", "tour"], ["--dtype", "fp32"], ["--resume"],
            )
        ),
    ],
)
def test_again_goes_with_the_run_alone(words: list[str]) -> None:
    assert "--again" in xlafuse(*words, code=2)


def test_a_repetition_that_was_stopped_goes_on_as_its_message_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: list[str]
) -> None:
    folder = tmp_path / "a run"
    xlafuse("gelu", "softmax", "--suite", "tour", "-i", "xla,inductor", "--target", "h200", "--out", folder)
    xlafuse("softmax", "--suite", "tour", "-i", "triton", "--out", folder, "--resume")
    run_folder.write_run(folder, {**run_folder.read_run(folder), "sources": "2" * 64})  # it was of another program
    plan = selection.resolve(["gelu", "softmax"], suite="tour", directions=["fwd"])
    named = [case.id for case, _ in plan.work]
    again = [word for case in named for word in ("--again", f"{case}=low clocks")]
    compiled.clear()

    def append(folder: Path, record: Record) -> None:
        if len(compiled) == 3:
            raise KeyboardInterrupt
        keep(folder, record)

    keep = run_folder.append
    with monkeypatch.context() as stopping:
        stopping.setattr(run_folder, "append", append)
        said = xlafuse("--out", folder, *again, code=130)
    assert compiled == ["gelu xla", "gelu inductor", "softmax xla"]
    noted = [entry["case"] for entry in run_folder.read_run(folder)["again"]]
    assert noted == named
    command = next(line for line in said.splitlines() if "goes on" in line).partition(" and ")[2]
    compiled.clear()
    xlafuse(*shlex.split(command.removesuffix(" goes on")))
    assert compiled == ["softmax xla", "softmax inductor", "softmax triton"]
    segments = {record.id: record.segment for record in run_folder.read_records(folder)[0]}
    assert {segments[f"{case}/xla"] for case in named} == {"s3", "s4"}


def test_own_functions_do_not_run_on_other_machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "own_code", raising=False)
    (tmp_path / "own_code.py").write_text("import torch\ndef mine(x): return torch.tanh(x)\n")
    xlafuse(*OWN, "own_code.py:mine", "--out", "run")
    case = next(case.id for case, _ in selection.resolve(["gelu"], suite="tour").work)
    for words in (["--resume", "--out", "run"], ["--out", "run", "--again", f"{case}=why"]):
        assert "--with" in xlafuse(*words, "--on", "ray://nowhere:1", code=2)


@pytest.mark.parametrize("text", ["gelu", "gelu=", "no/such/case=why"])
def test_a_case_needs_a_reason_and_must_be_in_the_run(text: str) -> None:
    plan = selection.resolve(["gelu"], suite="tour", implementations=["xla"])
    with pytest.raises(UsageError, match="CASE=REASON|in the run"):
        selection.repeated({"suite": "tour", "plan": plan.to_json()}, [text])


def test_a_later_program_adds_cases_and_implementations() -> None:
    plan = selection.resolve(["gelu"], suite="tour", implementations=["xla"])
    (case, _), *_ = plan.work
    added = next(id for id in (case.id for case, _ in selection.resolve([], suite="tour").work) if "softmax" in id)
    made = {"suite": "tour", "plan": plan.to_json()}
    anew, _ = selection.repeated(made, [f"{case.id}=a new row", f"{added}=a new case"], ["triton"])
    rows = {case.id: {i.name for i in found} for case, found in anew.work}
    assert rows[case.id] == {"xla", "triton"} and {"xla", "inductor", "triton"} < rows[added]
    with pytest.raises(UsageError, match="no-such-row"):
        selection.repeated(made, [f"{case.id}=why"], ["no-such-row"])
