"""Inspect: kernels in order with their contents; a time only where the device's records leave no doubt."""

import json
from pathlib import Path
from typing import Any

import pytest

from compare import inspect_run, record
from compare.blocks import BLOCKS
from compare.record import Record
from compare.selection import UsageError

CASE = next(c for c in BLOCKS["rmsnorm"].cases("quick") if c.direction == "train")
KERNEL = {
    "name": "fusion_1", "kind": "reduction", "ops": ["mul", "reduce_sum", "mul"], "stages": ["norm"],
    "lines": ["rmsnorm.py:12"], "provenance": "compiled", "registers": 40, "spills_bytes": 0, "shared_bytes": 2048,
    "num_warps": 4, "bytes_read": 134217728, "bytes_written": 8192,
}


def launched(*kernels: tuple[str, float]) -> list[dict[str, Any]]:
    return [{"name": name, "duration_us": us} for name, us in kernels]


def named(*names: str | None) -> list[dict[str, Any]]:
    return [{"name": f"hlo{i}", "runtime_name": name} for i, name in enumerate(names)]


@pytest.mark.parametrize(
    ("kernels", "launches", "times"),
    [
        (named("a", "b"), launched(("b", 2), ("a", 1)), [1, 2]),
        (named("a", None), launched(("a", 1), ("nvjet", 5)), [1, 5]),  # the library's name is known at run time alone
        (named("a", None), launched(("nvjet", 5), ("a", 1)), [1, None]),  # position contradicts the name
        (named("a", None, None), launched(("a", 1), ("nvjet", 5)), [1, None, None]),
        (named("a", "a"), launched(("a", 1), ("b", 9), ("a", 2)), [1, 2]),
        (named("a", "a"), launched(("a", 1)), [None, None]),
        (named("a"), launched(("a", 1), ("a", 2)), [None]),
        ([{"name": "a", "launches": 2}], launched(("a", 1), ("a", 2)), [3]),
        ([{"name": "a", "launches": None}], launched(("a", 1), ("a", 2)), [3]),
        ([{"name": "a"}, {"name": "b"}], launched(("x", 1), ("y", 2)), [1, 2]),
        (named("a", "b"), launched(("x", 1), ("y", 2)), [None, None]),  # promised names that never ran
        (named("a"), [], [None]),
        ([], launched(("a", 1)), []),
    ],
)
def test_matching(kernels: list[Any], launches: list[Any], times: list[float | None]) -> None:
    assert inspect_run.match(kernels, launches) == times


def records() -> list[Record]:
    backward = [KERNEL | {"name": "a"}, {"name": "b"}]
    ran = [{"name": "fusion_1", "start": 0.0, "end": 33.2e-6}]
    part = {"device_time": [[1e-6]], "busy_time": [[1e-6]], "launches": 1}
    measurement = {
        "timer": "cupti",
        "parts": {"forward": part | {"records": ran}, "backward": part | {"records": [ran[0] | {"name": "z"}]}},
        "wall_time": [1e-6], "peak_memory_bytes": None,
    }
    return [
        Record(CASE, "xla", "xla", "ok", kernels={"forward": [KERNEL], "backward": backward}, measurement=measurement),
        Record(CASE, "eager", "eager", "ok", measurement=measurement),
        Record(CASE, "cuda", "cuda", "skipped", detail="no backward [red]kernel[/red] \x1b[31m", target="h200"),
    ]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    record.create(tmp_path / "run", {"segments": []})
    for each in records():
        record.append(tmp_path / "run", each)
    return tmp_path / "run"


def test_the_tree_says_what_is_inside(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    views, warnings = inspect_run.read(folder)
    inspect_run.show(views)
    text = capsys.readouterr().out
    assert warnings == []
    assert max(map(len, text.splitlines())) <= 80
    flat = " ".join(text.replace("│", " ").split())
    for part in (
        "rmsnorm/llama-8b/bf16/train", "xla: ok", "forward: 1 kernel, 1 launch measured, 33.2 µs in all",
        "1. fusion_1 (reduction) 33.2 µs", "ops: mul x2, reduce_sum", "from: rmsnorm.py:12", "4 warps", "40 registers",
        "no spills", "2.048 kB shared memory", "reads 134.2 MB, writes 8.192 kB", "no kernels listed by its compiler",
        "cuda: skipped, for h200", "no backward [red]kernel[/red] [31m",
    ):
        assert part in flat, part
    assert "\x1b" not in text


def test_missing_keys_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    subject = Record(CASE, "xla", "xla", "compiled", kernels={"forward": [{}]})
    inspect_run.show([inspect_run.view_of(subject)])
    text = capsys.readouterr().out
    assert "1. unnamed" in text
    assert "None" not in text and "µs" not in text


def test_json_has_every_kernel_and_its_time(folder: Path) -> None:
    views, _ = inspect_run.read(folder, implementation=["xla"])
    (view,) = json.loads(inspect_run.as_json(views))
    (kernel,) = view["parts"]["forward"]["kernels"]
    assert kernel == KERNEL | {"measured_us": pytest.approx(33.2)}
    assert [k["measured_us"] for k in view["parts"]["backward"]["kernels"]] == [None, None]
    assert view["parts"]["backward"]["launches"][0]["name"] == "z"


def test_filters(folder: Path) -> None:
    assert len(inspect_run.read(folder, block=["rmsnorm"], case=["llama-8b"], direction=["train"])[0]) == 3
    with pytest.raises(UsageError, match="no implementation 'egaer'; did you mean eager"):
        inspect_run.read(folder, implementation=["egaer"])


def test_what_cannot_be_read_costs_itself_alone(folder: Path) -> None:
    strange = [{"forward": "x"}, {"forward": [{"registers": "many"}]}, {"forward": [{"ops": "add"}]}]
    for name, kernels in zip("abc", strange, strict=True):
        record.append(folder, Record(CASE, name, "xla", "compiled", kernels=kernels))
    views, warnings = inspect_run.read(folder)
    assert len(views) == 3
    assert [warning.split("/")[-1][0] for warning in warnings] == list("abc")


def test_times_of_a_wrong_result_are_not_shown() -> None:
    subject = records()[0]
    subject.status = "wrong"
    assert inspect_run.view_of(subject).parts["forward"].launches == []
