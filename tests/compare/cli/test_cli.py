"""The command line: exit codes, errors of one line, and the arguments that reach a run."""

import csv
import json
import platform
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
from commands import xlafuse
from made_records import made_record

from xlafuse.compare.base.paths import PROJECT
from xlafuse.compare.cli import doctor
from xlafuse.compare.cli.main import COMMANDS, cli
from xlafuse.compare.plan.selection import resolve
from xlafuse.compare.plan.timing_modes import Timing
from xlafuse.compare.record import run_folder
from xlafuse.compare.spec.blocks import BLOCKS

CASE = BLOCKS["softmax"].cases("quick")[0]
UNSET = {
    "verbose": False, "target": "h200", "traffic": False, "recorded": [], "stop_after": None, "cluster": None,
    "again": {},
}


@pytest.fixture
def executed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The plans and options of runs that would have started."""
    calls: list[Any] = []

    def execute(plan: Any, **options: Any) -> int:
        calls.append((plan, options))
        return 7

    monkeypatch.setitem(sys.modules, "xlafuse.compare.run.run", SimpleNamespace(execute=execute))  # type: ignore[arg-type]
    return calls


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    plan = resolve(["softmax"], suite="quick", directions=["fwd"])
    run_folder.create(tmp_path / "run", {"segments": [], "suite": "quick", "target": "h200", "plan": plan.to_json()})
    run_folder.append(tmp_path / "run", made_record(CASE, "xla", "xla", "compiled", detail="for h200"))
    return tmp_path / "run"


def test_run_passes_on_the_selection(executed: list[Any], tmp_path: Path) -> None:
    out = tmp_path / "new"
    result = xlafuse(
        "run", "softmax,gelu", "-i", "xla,triton", "-i", "inductor", "--dtype", "bf16", "--target", "h200", "--out", out
    )
    assert result.exit_code == 7, result.output
    ((plan, options),) = executed
    names = ["xla", "inductor", "triton"]
    assert plan == resolve(["softmax", "gelu"], suite="quick", implementations=names, dtypes=["bf16"])
    assert options == {"folder": out, "resume": False, **UNSET}
    assert not out.exists()  # the run makes it


def test_resume_keeps_selection_and_target(executed: list[Any], folder: Path) -> None:
    assert xlafuse("run", "--out", folder, "--resume").exit_code == 7
    ((plan, options),) = executed
    assert plan == resolve(["softmax"], suite="quick", directions=["fwd"])
    assert options == {"folder": folder, "resume": True, **UNSET}


def test_run_passes_on_modes_and_restarts(
    executed: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("xlafuse.compare.base.host.gpu_present", lambda: True)
    xlafuse("run", "gelu", "--mode", "cold,warm", "--mode", "graph", "--restarts", "1", "--out", tmp_path / "new")
    ((plan, _),) = executed
    assert plan.timing == Timing(("warm", "graph"), restarts=1)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "--mode", "warm", "--target", "h200"], "times nothing"),
        (["run", "sofmax"], "no block 'sofmax'; did you mean softmax"),
        (["run", "--target", "h20"], "no target 'h20'; did you mean h200"),
        (["run", "gelu", "--size", "rows=x"], "--size takes axes and their sizes"),
        (["run", "gelu", "--size", "rows"], "--size takes axes and their sizes"),
        (["run", "--size", "rows=3"], "--size needs a block"),
        (["run", "gelu", "--size", "rwos=3"], "did you mean rows"),
        (["list", "atention"], "no block 'atention'; did you mean attention"),
        (["run", "--suite", "qick"], "no suite 'qick'; did you mean quick"),
        (["run", "--resume"], "--resume needs --out"),
        (["run", "--stop-after", "9"], "--stop-after takes a time"),
        (["run", "--stop-after", "9m", "--target", "h200"], "--stop-after is for a run on a GPU"),
        (["run", "--shard", "3/2"], "--shard takes K/N"),
        (["run", "--shard", ""], "--shard takes K/N"),  # as of a variable that is not set
        (["run", "--shard", "1/2", "--resume", "--out", "{run}"], "--shard is for a new run"),
        (["run", "--shard", "", "--resume", "--out", "{run}"], "--shard is for a new run"),
        (["run", "--xla-autotune-from", "h20"], "'h20' holds no"),
        (["run", "--xla-autotune-from", "h200", "--target", "h200"], "--xla-autotune-from is for a run on a GPU"),
        (["run", "--xla-autotune-from", "h200", "--resume", "--out", "{run}"], "--xla-autotune-from is for a new run"),
        (["run", "--resume", "--out", "{tmp}/none"], "no run to resume"),
        (["run", "--out", "{tmp}"], "exists already"),
        (["run", "--out", "{run}"], "--resume goes on with it"),
        (["report", "{tmp}/none"], "no such file or folder"),
        (["report", "{tmp}"], "no graph found; expected a run folder"),
        (["inspect", "{tmp}/none"], "no such file or folder"),
        (["report", "{run}", "--block", "sofmax"], "no block 'sofmax' among these records; did you mean softmax"),
        (["inspect", "{run}", "-i", "xl"], "no implementation 'xl' among these records; did you mean xla"),
        (["inspect", "{run}", "--view", "tims"], "no view 'tims'; did you mean times"),
        (["inspect", "{run}", "--view", "times", "--why"], "leave it or --view times out"),
        (["report", "{run}", "--view", "times"], "a page holds all views"),
        (["report", "{run}", "-o", "{tmp}/x.pdf"], "the ending is the form; expected .html, .md"),
        (["report", "{run}", "-o", "{tmp}/x.md", "--no-files"], "--no-files goes with a page"),
        (["report", "{run}", "-o", "{tmp}/x.svg", "--view", "matrix"], "a picture draws times"),
        (["report", "{run}", "-o", "{tmp}/x.csv", "--view", "why"], "none of 1 records has a graph"),
    ],
)
def test_errors_are_one_line_and_exit_2(
    executed: list[Any], folder: Path, tmp_path: Path, words: list[str], message: str
) -> None:
    result = xlafuse(*(word.format(tmp=tmp_path, run=folder) for word in words))
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""
    assert executed == []


@pytest.mark.parametrize("text", ["", "{", "[]", '{"a": 1'])
def test_a_half_written_run_json(folder: Path, text: str) -> None:
    (folder / "run.json").write_text(text)
    for command in ("report", "inspect"):
        result = xlafuse(command, folder)
        assert result.exit_code == 2
        assert "run.json" in result.stderr


@pytest.mark.parametrize(
    "line",
    [b'{"schema": 1, "stat', b"\xff\xfe", b"[1]", b'{"schema": 99}', b'{"schema": 1, "status": "ok", "case": 3}',
     b'{"schema": 1, "status": "\\u001b[31m"}', b'{"schema":1,"status":"ok","implementation":"x","compiler":"x","case":'
     b'{"block":"b","name":"n","sizes":{},"dtype":"fp7","direction":"fwd"}}'],
)
def test_a_broken_line_costs_a_warning(folder: Path, line: bytes) -> None:
    with (folder / "records.jsonl").open("ab") as file:
        file.write(line)
    run_folder.append(folder, made_record(CASE, "triton", "triton", "compiled", detail="for h200"))
    out = folder.parent / "run.md"
    for words in (["inspect", folder], ["inspect", folder, "--view", "times"], ["report", folder, "-o", out]):
        result = xlafuse(*words)
        assert result.exit_code == 0, result.output
        assert "records.jsonl:2" in result.stderr
        shown = out.read_text() if words[0] == "report" else result.stdout
        assert "\x1b" not in result.output + shown
        assert "xla" in shown and "triton" in shown


def test_a_run_without_records_yet(folder: Path) -> None:
    (folder / "records.jsonl").unlink()
    for view in ("kernels", "times"):
        result = xlafuse("inspect", folder, "--view", view)
        assert (result.exit_code, result.stdout.strip()) == (0, "no records")
        assert "no record was written yet" in result.stderr
    assert json.loads(xlafuse("inspect", folder, "--view", "times", "--json").stdout)["rows"] == []
    refused = xlafuse("report", folder)
    assert refused.exit_code == 2 and "no record to show" in refused.stderr


def test_times_are_printed_as_text_and_json_and_written_as_markdown_and_csv(folder: Path) -> None:
    assert "compiled" in xlafuse("inspect", folder, "--view", "times").stdout
    identity = ("softmax", "xla", "compiled")
    (row,) = json.loads(xlafuse("inspect", folder, "--view", "times", "--json").stdout)["rows"]
    assert (row["block"], row["implementation"], row["status"]) == identity
    for ending in ("md", "csv", "json"):
        out = folder.parent / f"run.{ending}"
        done = xlafuse("report", folder, "--view", "times", "-o", out)
        assert done.exit_code == 0 and done.stdout.count("\n") == 1 and str(out) in done.stdout
    assert "| xla" in (folder.parent / "run.md").read_text()
    assert json.loads((folder.parent / "run.json").read_text())["rows"] == [row]
    (line,) = csv.DictReader((folder.parent / "run.csv").open())
    assert list(line) == list(row) and (line["block"], line["implementation"], line["status"]) == identity


def test_a_page_is_written_next_to_the_run(folder: Path) -> None:
    done = xlafuse("report", folder)
    page = folder.with_name("run.html")
    assert done.exit_code == 0 and str(page) in done.stdout and "softmax" in page.read_text()


def test_list_names_all_blocks_cases_and_implementations(tmp_path: Path) -> None:
    text, data = xlafuse("list").stdout, json.loads(xlafuse("list", "--json").stdout)
    assert data["schema"] == "xlafuse.list/1" and [block["name"] for block in data["blocks"]] == list(BLOCKS)
    for block in data["blocks"]:
        spec = BLOCKS[block["name"]]
        assert [i["name"] for i in block["implementations"]] == [i.name for i in spec.implementations]
        for suite, cases in block["cases"].items():
            expanded = sum(len(c["dtypes"]) * len(c["precisions"]) * len(c["directions"]) for c in cases)
            assert expanded == len(spec.cases(suite))
        for implementation in spec.implementations:
            assert implementation.target in text and implementation.summary in text
    assert "h200" in data["targets"]
    xlafuse("list", "-o", str(tmp_path / "blocks.md"))
    table = (tmp_path / "blocks.md").read_text().splitlines()
    assert len(table) == 2 + len(BLOCKS) and table[2].startswith("| vector\\_add")
    assert xlafuse("list", "-o", str(tmp_path / "blocks.md"), "--json").exit_code == 2


def test_a_suite_without_cases_is_not_listed() -> None:
    assert "suite parallel" not in xlafuse("list", "moe").stdout
    assert "suite parallel:\n    mixtral-thin" in xlafuse("list", "moe_parallel").stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_and_option_has_help(name: str) -> None:
    assert name in xlafuse("--help").stdout
    assert xlafuse(name, "--help").exit_code == 0
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    for parameter in command.params:
        assert not isinstance(parameter, click.Option) or parameter.help, parameter.name


@pytest.mark.parametrize(
    ("words", "now"),
    [(["reprot"], "report"), (["explain", "f.py:f", "--framewrok", "jax"], "--framework")],
)
def test_an_unknown_command_or_option_names_the_right_one(words: list[str], now: str) -> None:
    result = xlafuse(*words)
    assert result.exit_code == 2 and "No such" in result.stderr and now in result.stderr.splitlines()[-1]


def test_all_commands_together_have_at_most_50_options() -> None:
    commands = [cli.get_command(click.Context(cli), name) for name in COMMANDS]
    options = {
        option for command in commands if command is not None for each in command.params
        for option in each.opts if option.startswith("--")
    }
    assert len(options) <= 50, sorted(options)


FOUND = {
    "xla": {"jax": "0.11.2", "jaxlib": "0.11.2", "jax-cuda13-pjrt": "0.11.2", "jax-cuda13-plugin": "0.11.2",
            "cupti-python": "13.0.1", "tokamax": "0.0.17"},
    "torch": {"torch": "2.13.0+cu130", "triton": "3.7.1", "cuda-core": "0.3.2", "cuda-bindings": "13.0.1",
              "nvidia-cuda-nvrtc": "13.0.88", "cupti-python": "13.0.1", "liger-kernel": "0.8.5",
              "quack-kernels": "0.6.5", "nvidia-cutlass-dsl": "4.8.1", "flash-attn-4": "4.0.0b36"},
}
NO_GPU, GPU = doctor.Machine(False, [], None, "g++"), doctor.Machine(True, ["NVIDIA H200"], "13.0", "g++")


def diagnoses(machine: doctor.Machine, **changes: dict[str, str | None]) -> dict[str, doctor.Diagnosis]:
    interpreters = {
        side: doctor.Interpreter(f"/{side}/python", "3.12.1", packages | changes.get(side, {}), True)
        for side, packages in FOUND.items()
    }
    return {each.group: each for each in doctor.diagnose(machine, interpreters)}


def test_doctor_with_a_gpu() -> None:
    assert {each.result for each in diagnoses(GPU).values()} == {"runs and is timed here"}
    without = diagnoses(GPU, torch={"cupti-python": None})["Triton"]
    assert without.runs and "device time not measured: cupti-python is not installed" in without.result
    assert without.command == '/torch/python -m pip install "cupti-python==13.0.*"'
    assert "CPU build" in diagnoses(GPU, torch={"torch": "2.13.0+cpu"})["PyTorch"].result


def test_doctor_without_a_gpu() -> None:
    found = diagnoses(NO_GPU)
    assert found["Triton, with liger-kernel"].result.startswith("compiles for h200, not checked")
    for group in ("XLA", "TorchInductor", "Triton"):
        assert found[group].result.startswith("compiles for h200, checked on the CPU")
    assert found["PyTorch, GPU only"].result.startswith("not here: needs an NVIDIA GPU")
    assert "xla-unfused" in found["XLA"].result and found["XLA"].result.endswith(": compiled only)")
    remat = found["TorchInductor, with torch>=2.12"]
    assert remat.implementations == ["inductor-remat"]
    assert remat.result == "compiles for h200, checked on the CPU"  # as run_target.CHECKS has it


def test_doctor_checks_requirements_of_single_implementations() -> None:
    for machine in (GPU, NO_GPU):
        found = diagnoses(machine, torch={"torch": "2.11.0+cu130"})
        assert found["TorchInductor"].runs
        remat = found["TorchInductor, with torch>=2.12"]
        assert remat.result == "not here: torch 2.11.0+cu130 is too old"
        assert remat.command == '/torch/python -m pip install "torch>=2.12,<2.14"'
        nothing = diagnoses(machine, torch={"torch": None})["TorchInductor, with torch>=2.12"]
        assert nothing.result.count("torch is not installed") == 1


def test_doctor_names_no_pip_command_for_an_old_python() -> None:
    jax = dict.fromkeys(("jax", "jaxlib", "jax-cuda13-pjrt"), "0.10.2")
    old = doctor.Interpreter("/xla/python", "3.11.7", jax, True)
    torch = doctor.Interpreter("/torch/python", "3.12.1", FOUND["torch"], True)
    found = {each.group: each for each in doctor.diagnose(NO_GPU, {"xla": old, "torch": torch})}
    (tokamax,) = (each for each in found.values() if "tokamax" in each.implementations)
    assert not tokamax.runs and "python 3.11.7 is too old" in tokamax.result and tokamax.command is None


def test_doctor_says_whether_xla_compiles_for_tpus() -> None:
    packages: dict[str, str | None] = {"jax": "0.11.2", "libtpu": None}
    without = doctor.tpu_diagnosis(doctor.Interpreter("/xla/python", "3.12.1", packages, False))
    assert (without.runs, without.command) == (False, '/xla/python -m pip install "jax[tpu]==0.11.2"')
    found = doctor.tpu_diagnosis(doctor.Interpreter("/xla/python", "3.12.1", packages | {"libtpu": "0.0.48"}, False))
    assert found.runs and found.command is None and {"xla", "xla-remat"} <= set(found.implementations)


def test_doctor_and_a_run_without_a_gpu_agree_on_cpu_checks() -> None:
    results = {name: each.result for each in diagnoses(NO_GPU).values() if each.runs for name in each.implementations}
    one_gpu = [block for block in BLOCKS.values() if not block.spans_gpus]
    for i in (i for block in one_gpu for i in block.implementations if i.needs_gpu is None):
        checked, _, but = results[i.name].partition("(")
        unchecked = but.partition(":")[0].split(" and ")
        is_checked = "checked on the CPU" in checked and i.name not in unchecked
        assert is_checked == (i.backend.cpu_check_worker is not None), i


@pytest.mark.parametrize(
    ("group", "side", "changes", "result", "command"),
    [
        ("XLA", "xla", {"jax": "0.9.1"}, "jax 0.9.1 is outside >=0.10,<0.12", '/xla/python -m pip install "jax>=0.10'),
        ("XLA", "xla", {"jax": "0.12.0"}, "jax 0.12.0 is outside", '"jax>=0.10,<0.12"'),
        ("Triton", "torch", {"triton": None}, "triton is not installed", '"triton>=3.6,<3.8"'),
        ("XLA", "torch", {"torch": None}, "torch is not installed", '"torch>=2.11,<2.14"'),
        ("TorchInductor", "torch", {"torch": "2.12.0+cpu"}, "without a GPU TorchInductor needs", '"torch==2.13.0"'),
        (
            "Triton, with liger-kernel", "torch", {"liger-kernel": None}, "liger-kernel is not installed",
            '/torch/python -m pip install "liger-kernel==0.8.5"',
        ),
        ("raw CUDA C++", "torch", {"cuda-core": None}, "cuda-core is not installed", '"cuda-core>=0.3"'),
    ],
)
def test_doctor_names_missing_packages_and_the_command(
    group: str, side: str, changes: dict[str, str | None], result: str, command: str
) -> None:
    found = diagnoses(NO_GPU, **{side: changes})[group]
    assert not found.runs
    assert result in found.result
    assert command in (found.command or "")


def test_doctor_accepts_the_versions_of_the_extras() -> None:
    extras = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    required = {requirement.partition(";")[0] for extra in ("xla", "cpu") for requirement in extras[extra]}
    packages = (*doctor.XLA_PACKAGES, doctor.TORCH, doctor.TRITON)
    assert {*packages} <= required


def test_doctor_remarks_on_versions_for_replay() -> None:
    old = doctor.Interpreter("/old/python", "3.11.7", {"jax": "0.10.2"}, True)
    new = doctor.Interpreter("/new/python", "3.12.1", {"jax": "0.11.2"}, True)
    torch = doctor.Interpreter("/old/python", "3.11.7", {}, True)
    remarks = doctor.remarks(NO_GPU, {"xla": old, "torch": torch})
    assert any("Python >= 3.12 with jax 0.11.2" in remark for remark in remarks)
    assert doctor.remarks(NO_GPU, {"xla": new, "torch": torch}) == []


@pytest.mark.parametrize(
    ("python", "machine", "named"),
    [("3.13.0", "x86_64", []), ("3.14.1", "x86_64", ["3.14.1", "3.14.1"]), ("3.12.1", "aarch64", ["aarch64"])],
)
def test_doctor_remarks_on_what_was_not_tried(
    monkeypatch: pytest.MonkeyPatch, python: str, machine: str, named: list[str]
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    found = dict.fromkeys(("xla", "torch"), doctor.Interpreter("/python", python, {"jax": "0.11.2"}, True))
    remarks = doctor.remarks(NO_GPU, found)
    assert len(remarks) == len(named) and all(word in remark for word, remark in zip(named, remarks, strict=True))


def test_doctor_remarks_on_a_broken_triton_interpreter() -> None:
    xla = doctor.Interpreter("/new/python", "3.12.1", {"jax": "0.11.2"}, True)
    for triton, numpy, works in (("3.6.0", "2.4.6", False), ("3.6.0", "2.3.5", True), ("3.7.1", "2.4.6", True)):
        torch = doctor.Interpreter("/python", "3.11.7", {"triton": triton, "numpy": numpy}, True)
        assert ("numpy<2.4" in str(doctor.remarks(NO_GPU, {"xla": xla, "torch": torch}))) == (not works)


def test_doctor_fails_only_when_nothing_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "gpu_present", lambda: False)
    monkeypatch.setenv("XLAFUSE_XLA_PYTHON", "/nowhere/python")
    monkeypatch.setenv("XLAFUSE_TORCH_PYTHON", "/nowhere/python")
    result = xlafuse("doctor")
    assert result.exit_code == 1
    assert "/nowhere/python does not start" in result.stdout
    data = json.loads(xlafuse("doctor", "--json").stdout)
    assert data["schema"] == "xlafuse.doctor/1"
    assert all(v["result"].startswith("not here") for v in data["diagnoses"])


def test_the_table_of_exit_codes_has_every_command() -> None:
    page = (PROJECT / "docs" / "report-data.md").read_text()
    table = page.partition("## Exit codes")[2].partition("\n## ")[0]
    assert {line.split("`")[1].split()[0] for line in table.splitlines() if line.startswith("| `")} == {*COMMANDS}
