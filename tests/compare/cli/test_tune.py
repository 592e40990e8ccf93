"""`xlafuse tune`: its table, its lines, its exit codes. A fake worker searches."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result
from output_schemas import assert_valid

from xlafuse.compare.base import host
from xlafuse.compare.cli import tune
from xlafuse.compare.cli.main import cli
from xlafuse.compare.spec.case import Case
from xlafuse.compare.workers.client import WorkerDied, WorkerError
from xlafuse.triton_side.configs import table as tables

GPU = {"gpu": "NVIDIA H200", "capability": [9, 0], "multiprocessors": 132, "triton": "3.6.0"}
CONFIG = {"block": 2048, "num_warps": 4}


class Workers:
    """A fake worker. Each block has one choice; `outcomes` has the results of its search, by block."""

    outcomes: dict[str, Any] = {}
    asked: list[str] = []
    stopped = 0

    def __init__(self, logs: Path, environment: Any) -> None:
        self.found: set[str] = set()
        (logs / "tuning.log").write_text("a warning\nTraceback: the cause\n")

    def stop(self) -> None:
        Workers.stopped += 1

    def ask(self, role: str, method: str, timeout: float = 0.0, **parameters: Any) -> Any:
        if method == "gpu":
            return GPU
        if method == "choices":
            block = parameters["case"]["block"]
            if block in self.found:
                return []
            self.found.add(block)
            return [{"kernel": f"{block}.configure", "shape_class": {"element_bytes": 2}}]
        if method == "compile":
            return 20 * len(parameters["choices"])
        block = parameters["kernel"].partition(".")[0]
        self.asked.append(block)
        outcome = self.outcomes[block]
        if isinstance(outcome, WorkerDied):
            self.found.clear()
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome


def faster(before: float | None = 10.0) -> dict[str, Any]:
    return {
        "case": "a/case", "candidates": 20, "dropped": {"spills registers": 3}, "before": CONFIG | {"num_warps": 8},
        "before_us": before, "us": 8.0, "config": CONFIG, "shared_bytes": 1024,
    }


UNCHANGED = faster() | {"config": None, "us": 10.0, "dropped": {}}


@pytest.fixture(autouse=True)
def scripted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("gpu"):
        return
    monkeypatch.setattr(tune, "WorkerPool", Workers)
    monkeypatch.setattr(host, "gpu_present", lambda: True)
    monkeypatch.setattr(tables, "FOLDER", tmp_path)
    monkeypatch.setattr(Workers, "outcomes", {"gelu": faster(), "softmax": UNCHANGED, "rmsnorm": faster(None)})
    monkeypatch.setattr(Workers, "asked", [])
    monkeypatch.setattr(Workers, "stopped", 0)


def run(*arguments: str, **options: Any) -> Result:
    return CliRunner().invoke(cli, ["tune", *arguments], **options)


def tuned_in(path: Path) -> set[str]:
    return {kernel for kernel, _ in tables.read(path).entries}


def test_a_faster_configuration_is_kept_and_shown(tmp_path: Path) -> None:
    result = run("gelu", "softmax", "rmsnorm")
    assert result.exit_code == 0, result.output
    table = tables.read(tmp_path / "h200.json")
    assert tuned_in(tmp_path / "h200.json") == {"gelu.configure", "rmsnorm.configure"}
    assert {entry.before_us for entry in table.entries.values()} == {10.0, None}
    assert all(entry.config == CONFIG and entry.shared_bytes == 1024 for entry in table.entries.values())
    assert "10.0" in result.stdout and "8.0" in result.stdout and "num_warps 8 -> 4" in result.stdout
    for name in ("gelu.configure", "softmax.configure", "rmsnorm.configure"):
        assert any(line.startswith(name) for line in result.stderr.splitlines())
    assert "the cause" not in result.stderr and "softmax" not in result.stdout and "h200.json" in result.stdout
    assert Workers.stopped


def test_what_another_gpus_table_had_stays_where_nothing_is_faster(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A GPU with a table of its own no longer reads the table of the most similar one."""
    kept = UNCHANGED | {"before": CONFIG}
    outcomes = {"gelu": kept | {"by_rule": False}, "softmax": kept | {"by_rule": True}}
    monkeypatch.setattr(Workers, "outcomes", outcomes)
    result = run("gelu", "softmax")
    assert result.exit_code == 0 and "h200.json has 1 entries" in result.stdout
    (entry,) = tables.read(tmp_path / "h200.json").entries.values()
    assert tuned_in(tmp_path / "h200.json") == {"gelu.configure"}
    assert entry == tables.Entry(CONFIG, 1024, 10.0, None)


def test_cases_and_their_implementations_can_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search also takes `triton-deterministic` in the cases for which the suite has it."""
    asked = []

    def choices(self: Any, role: str, method: str, **parameters: Any) -> Any:
        if method == "choices":
            asked.append((Case.from_json(parameters["case"]).id, parameters["implementation"]))
        return GPU if method == "gpu" else 0 if method == "compile" else []

    monkeypatch.setattr(Workers, "ask", choices)
    result = run("attention", "--suite", "full", "--case", "gpt2-fp16,public-qwen-3.5-2k")
    assert result.exit_code == 0, result.output
    shape = "attention/public-qwen-3.5-2k/bf16"
    assert asked == [
        ("attention/gpt2-fp16/fp16/train", "triton"),
        (f"{shape}/train", "triton"), (f"{shape}/train", "triton-deterministic"),
        ("attention/gpt2-fp16/fp16/fwd", "triton"), (f"{shape}/fwd", "triton"),
    ]
    result = run("attention", "--case", "public-qwen-3.5-2k")
    assert result.exit_code == 2 and "--suite full" in result.stderr


def test_the_table_goes_where_it_is_asked_to(tmp_path: Path) -> None:
    assert run("gelu", "--out", str(tmp_path / "new" / "mine.json")).exit_code == 0
    assert [path.name for path in tmp_path.iterdir()] == ["new"]
    assert tables.read(tmp_path / "new" / "mine.json").gpu == "NVIDIA H200"


def test_json_has_the_changes() -> None:
    result = run("gelu", "softmax", "--json")
    found = json.loads(result.stdout)
    assert_valid(found)
    assert found["gpu"] == "NVIDIA H200" and found["file"].endswith("h200.json") and found["left"] == 0
    assert {change["kernel"] for change in found["changed"]} == {"gelu.configure"}
    assert all(change["us"] == 8.0 and change["config"] == CONFIG for change in found["changed"])
    assert json.loads(run("softmax", "--json").stdout)["file"] is None


def test_a_file_is_written_for_changes_alone_and_keeps_entries_of_other_blocks(tmp_path: Path) -> None:
    assert run("softmax").exit_code == 0
    assert list(tmp_path.iterdir()) == []
    assert run("gelu").exit_code == run("rmsnorm").exit_code == 0
    assert tuned_in(tmp_path / "h200.json") == {"gelu.configure", "rmsnorm.configure"}


def test_an_interrupted_search_keeps_what_it_found(tmp_path: Path) -> None:
    Workers.outcomes["softmax"] = KeyboardInterrupt()
    result = run("gelu", "softmax", "rmsnorm")
    assert result.exit_code == 130
    assert tuned_in(tmp_path / "h200.json") == {"gelu.configure"}
    assert "gelu.configure" in result.stdout and "not searched" in result.stdout
    assert Workers.stopped


def test_a_failed_choice_leaves_the_others(tmp_path: Path) -> None:
    Workers.outcomes["softmax"] = WorkerError("out_of_memory", "OutOfMemoryError: 80 GiB")
    result = run("gelu", "softmax", "rmsnorm")
    assert result.exit_code == 0
    assert tuned_in(tmp_path / "h200.json") == {"gelu.configure", "rmsnorm.configure"}
    assert "80 GiB" in result.stderr and "the cause" in result.stderr


def test_a_choice_that_ends_the_worker_leaves_the_others(tmp_path: Path) -> None:
    Workers.outcomes["softmax"] = WorkerDied("signal SIGSEGV")
    result = run("gelu", "softmax", "rmsnorm", "--json")
    found = json.loads(result.stdout)
    assert result.exit_code == 1 and "SIGSEGV" in result.stderr
    assert tuned_in(tmp_path / "h200.json") == {"gelu.configure", "rmsnorm.configure"}
    assert (found["searched"], found["left"], found["failed"]) == (3, 0, 1)
    assert sorted(Workers.asked) == ["gelu", "rmsnorm", "softmax"]


def test_the_time_ends_the_search(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    clock = iter(range(0, 10_000, 25))
    monkeypatch.setattr(tune, "time", SimpleNamespace(monotonic=lambda: float(next(clock))))
    result = run("gelu", "softmax", "rmsnorm", "--stop-after", "100s")
    assert result.exit_code == 3 and "not searched" in result.stdout
    assert Workers.asked == ["gelu"]
    assert "gelu.configure" in (tmp_path / "h200.json").read_text()


def test_a_choice_that_was_not_compiled_in_time_is_left() -> None:
    Workers.outcomes["softmax"] = None
    result = run("gelu", "softmax", "rmsnorm", "--json")
    found = json.loads(result.stdout)
    assert result.exit_code == 3
    assert (found["searched"], found["left"], found["failed"]) == (2, 1, 0)


def without_a_worker(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    def refuse(*ignored: Any, **also: Any) -> Any:
        raise WorkerError("skipped", "torch is not installed")

    monkeypatch.setattr(Workers, "ask", refuse)


@pytest.mark.parametrize(
    ("words", "prepare", "said"),
    [
        (["gelo"], lambda patch, folder: None, "gelu"),
        (["gelu"], lambda patch, folder: patch.setattr(host, "gpu_present", lambda: False), "needs an NVIDIA GPU"),
        (["gelu"], without_a_worker, "torch is not installed"),
        (["gelu"], lambda patch, folder: (folder / "h200.json").write_text("{"), "h200.json"),
        (["gelu", "--out", "{}/file/h200.json"], lambda patch, folder: (folder / "file").touch(), "--out"),
    ],
    ids=["block", "gpu", "worker", "broken table", "place"],
)
def test_a_search_that_cannot_be_made_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, words: list[str], prepare: Any, said: str
) -> None:
    prepare(monkeypatch, tmp_path)
    result = run(*(word.format(tmp_path) for word in words))
    assert result.exit_code == 2 and said in result.stderr and Workers.asked == []
    assert len(result.stderr.strip().splitlines()) == 1


@pytest.mark.gpu
def test_a_small_kernel_is_tuned_in_seconds(tmp_path: Path) -> None:
    result = run("vector_add", "--json", "--out", str(tmp_path / "table.json"))
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["searched"] == 1 and found["left"] == 0
    assert "vector_add.configure" in result.stderr and "failed" not in result.stderr
    for change in found["changed"]:
        assert change["us"] < change["before_us"]
