"""`make sanitize` without its tool and without a GPU: its launches, its reading of a log, its messages."""

from __future__ import annotations

import os
import re
import signal
import stat
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import xlafuse.triton_side
from tools.sanitizer import log as sanitizer_log
from tools.sanitizer import run as sanitize
from tools.sanitizer.log import Launched, Outcome, parse, summary
from xlafuse.triton_side.calls import cuda_program
from xlafuse.triton_side.cuda.common import tensors
from xlafuse.triton_side.kernels.shared.launch import INTERPRETED

pytestmark = pytest.mark.full

PACKAGE = Path(xlafuse.triton_side.__file__).parent
KERNELS = [
    Launched("softmax_forward", "CUDA C++", ["_Z15softmax_forwardIf", "softmax_forward"], 4, 64),
    Launched("softmax_forward_kernel", "Triton", ["softmax_forward_kernel"], 2, 16),
    Launched("gelu_forward_kernel", "Triton", ["gelu_forward_kernel"], 2, 0),
]
MEMCHECK = """\
========= COMPUTE-SANITIZER
========= Invalid __global__ read of size 4 bytes
=========     at softmax_forward_kernel+0x1a0 in softmax.py:105
=========     by thread (31,0,0) in block (0,0,0)
=========     Access at 0x7f0000000204 is out of bounds
=========
========= Invalid __global__ write of size 2 bytes
=========     at void softmax_forward<float, (int)1, (int)4>(const T1 *, T1 *, long long, int)+0x90
=========
========= Invalid __global__ read of size 4 bytes
=========     at void at::native::elementwise_kernel<(int)128>(int)+0x90
=========
========= ERROR SUMMARY: 5 errors
"""
RACE = """\
========= Error: Race reported between Write access at softmax_forward_kernel+0x90
=========     and Read access at softmax_forward_kernel+0x100 [508 hazards]
=========
"""
RACECHECK = f"""\
========= COMPUTE-SANITIZER
{RACE}========= Warning: Race reported between Write access at softmax_forward_kernel+0x80
=========     and Write access at softmax_forward_kernel+0x80 [2 hazards]
=========
========= RACECHECK SUMMARY: 2 hazards displayed (1 error, 1 warning)
"""


def test_a_log_is_read_by_kernel() -> None:
    outcome = parse("memcheck", MEMCHECK, KERNELS)
    assert [report.kernel for report in outcome.reports] == ["softmax_forward_kernel", "softmax_forward", None]
    assert (outcome.errors, outcome.unattributed, outcome.failure) == (5, 3, None)
    outcome = parse("racecheck", RACECHECK, KERNELS)
    assert (outcome.errors, outcome.warnings) == (1, 1)
    assert [outcome.count("softmax_forward_kernel", warnings) for warnings in (False, True)] == [1, 1]


def test_the_summary_has_a_row_for_every_kernel_and_the_first_reports() -> None:
    outcomes = [parse("memcheck", MEMCHECK, KERNELS), parse("racecheck", RACECHECK, KERNELS)]
    text = summary(KERNELS, outcomes, "compute-sanitizer 2026.4, NVIDIA H200")
    assert "| softmax_forward | CUDA C++ | 4 | 64 | 1 | 0 |" in text
    assert "| softmax_forward_kernel | Triton | 2 | 16 | 1 | 1 (1 warnings) |" in text
    assert "| gelu_forward_kernel | Triton | 2 | 0 | 0 | no shared memory |" in text
    assert "- memcheck: 5 errors, 3 of them in other kernels or not printed" in text
    assert "- memcheck, softmax_forward_kernel: Invalid __global__ read of size 4 bytes; at softmax_forward_k" in text


@pytest.mark.parametrize(
    ("log", "failure"),
    [
        ("========= COMPUTE-SANITIZER\n========= Error: process didn't terminate successfully\n", "printed no summary"),
        ("", "memcheck printed no summary: no output"),
        (
            "========= Internal Sanitizer Error: The Sanitizer didn't track the launch.\n"
            "========= ERROR SUMMARY: 0 errors\n",
            "didn't track the launch",
        ),
    ],
)
def test_an_incomplete_check_is_a_failure(log: str, failure: str) -> None:
    outcome = parse("memcheck", log, KERNELS)
    assert outcome.failure and failure in outcome.failure
    assert "not fully checked" in summary(KERNELS, [outcome], "")


def fake_sanitizer(folder: Path, log: str, status: int = 0, sleep: int = 0) -> str:
    path = folder / "compute-sanitizer"
    (folder / "written").write_text(log)
    path.write_text(
        "#!/bin/sh\n"
        'while [ $# -gt 0 ]; do [ "$1" = --log-file ] && log=$2; shift; done\n'
        f'cat {folder}/written > "$log"; echo kernels gelu; sleep {sleep}; exit {status}\n'
    )
    path.chmod(path.stat().st_mode | stat.S_IEXEC)
    return str(path)


# A tool that prints the names of its cases, as launch_all does.
PRINTS_ITS_CASES = """\
#!/bin/sh
while [ $# -gt 0 ]; do [ "$1" = --log-file ] && log=$2; [ "$1" = --launch ] && names=$2; shift; done
cat {folder}/written > "$log"
python3 -c 'import json, sys; print(*json.load(open(sys.argv[1])), sep="\\n")' "$names"
"""


def test_a_tool_that_is_too_slow_or_crashes_names_the_case(tmp_path: Path) -> None:
    slow = sanitize.run_tool(fake_sanitizer(tmp_path, "", sleep=30), "memcheck", KERNELS, 0.5)
    assert slow.errors is None and slow.failure == "memcheck was stopped after 0 s (--limit), in: kernels gelu"
    died = sanitize.run_tool(fake_sanitizer(tmp_path, MEMCHECK, status=1), "memcheck", KERNELS, 10)
    assert died.errors == 5 and died.failure and "status 1, later kernels were not checked" in died.failure
    assert slow.checked == died.checked == frozenset()
    fine = sanitize.run_tool(fake_sanitizer(tmp_path, MEMCHECK), "memcheck", KERNELS, 10)
    assert fine.errors == 5 and fine.failure is None


def test_a_refused_device_is_an_error(tmp_path: Path) -> None:
    refusing = fake_sanitizer(tmp_path, "========= Error: Device not supported.\n", status=255)
    with pytest.raises(sanitize.CannotCheck, match="memcheck refuses this device"):
        sanitize.run_tool(refusing, "memcheck", KERNELS, 10)


def test_a_missing_tool_or_gpu_is_named_with_exit_status_2(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sanitize.shutil, "which", lambda name: None)
    monkeypatch.setattr(sanitize.os, "access", lambda *arguments: False)
    assert sanitize.main([]) == 2
    assert re.search(r"^sanitize: compute-sanitizer is not on PATH.*pip install nvidia-cuda", capsys.readouterr().err)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert sanitize.main(["--sanitizer", fake_sanitizer(tmp_path, "")]) == 2
    assert "no NVIDIA GPU is visible" in capsys.readouterr().err


@pytest.mark.skipif(not INTERPRETED, reason="the interpreter can list kernels without running them")
def test_the_cases_launch_every_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime.interpreter import InterpretedFunction

    launched: set[str] = set()
    monkeypatch.setattr(
        InterpretedFunction, "run", lambda self, *arguments, **options: launched.add(self.fn.__name__)
    )
    for check in ("check", "check_dtype_and_device"):
        monkeypatch.setattr(tensors, check, lambda operation, **operands: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    h200 = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: h200)
    monkeypatch.setattr(cuda_program, "compile_kernel", lambda source, expression, *options: expression)
    monkeypatch.setattr(cuda_program, "launch", lambda expression, *rest: launched.add(expression.partition("<")[0]))
    for name, call in sanitize.cases("cpu"):
        before = set(launched)
        launched.clear()
        call()
        assert launched, f"{name} launches no kernel, and would count as not compiled in time"
        launched |= before
    written = {
        name
        for path in (*PACKAGE.glob("kernels/**/*.py"), *PACKAGE.glob("parallel/*.py"))
        if path.parent.name != "hopper"  # no interpreter runs Gluon
        for name in re.findall(r"^def (\w+_kernel)\(", path.read_text(), re.MULTILINE)
    } | {
        name
        for path in PACKAGE.glob("cuda/*.cu")
        for name in re.findall(r"\b(\w+)\(const \w+\* __restrict__", path.read_text())
    }
    assert len(written) > 25
    assert launched == written


def test_only_cases_with_one_of_the_texts_are_launched(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen: list[str] = []

    def launched(limit: float, names: list[str]) -> list[Launched]:
        chosen.extend(names)
        return CASED

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(sanitize, "_launched", launched)
    sanitize.main(["--case", "cuda gelu", "--case", "kernels rope", "--sanitizer", fake_sanitizer(tmp_path, "")])
    assert {tuple(name.split(" ")[:2]) for name in chosen} == {("cuda", "gelu"), ("kernels", "rope")}
    assert sanitize.main(["--case", "jelu", "--sanitizer", fake_sanitizer(tmp_path, "")]) == 2
    assert "'jelu'" in capsys.readouterr().err


def test_cases_of_equal_shapes_differ_in_their_names() -> None:
    names = [name for name, _ in sanitize.cases("cpu")]
    assert len(names) > 100 and len(set(names)) == len(names)
    shapes = "kernels attention 1x4x67x64 1x2x67x64 1x2x67x64"
    assert {f"{shapes} causal=1 window=19 torch.bfloat16", f"{shapes} causal=0 torch.bfloat16"} <= set(names)


def test_the_summary_shows_a_limited_number_of_reports() -> None:
    text = summary(KERNELS, [parse("racecheck", RACECHECK.replace(RACE, 9 * RACE), KERNELS)], "")
    assert text.count("- racecheck, softmax_forward_kernel: ") == sanitizer_log.SHOWN + 1


CASED = [
    Launched("gelu_forward_kernel", "Triton", ["gelu_forward_kernel"], 2, 0, ["gelu bf16", "gelu fp32"]),
    Launched("softmax_forward_kernel", "Triton", ["softmax_forward_kernel"], 1, 16, ["softmax bf16"]),
]


def test_the_summary_lists_cases_that_were_not_checked(tmp_path: Path) -> None:
    outcome = sanitize.run_tool(fake_sanitizer(tmp_path, "========= ERROR SUMMARY: 0 errors\n"), "memcheck", CASED, 60)
    assert outcome.failure is None and outcome.checked == frozenset()  # the fake tool printed no case's name
    outcome = replace(outcome, checked=frozenset({"gelu bf16"}))
    text = summary(CASED, [outcome], "")
    assert "| gelu_forward_kernel | Triton | 2 | 0 | 0, 1 of 2 cases |" in text
    assert "| softmax_forward_kernel | Triton | 1 | 16 | not checked |" in text
    assert "memcheck: 2 cases were not checked**: `gelu fp32`, `softmax bf16`" in text
    assert "it checked all" not in text
    every = frozenset({"gelu bf16", "gelu fp32", "softmax bf16"})
    for failure in (None, "it died"):
        text = summary(CASED, [replace(outcome, checked=every, failure=failure)], "")
        assert ("memcheck: 0 errors; it checked all 3 cases that were compiled" in text) == (failure is None)
        assert "not checked" not in text


def test_parallel_processes_reach_every_case(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [name for name, _ in sanitize.cases("cpu")]
    launched = [Launched("kernel", "Triton", ["kernel"], 1, 0, names)]
    path = Path(fake_sanitizer(tmp_path, "========= ERROR SUMMARY: 0 errors\n"))
    path.write_text(PRINTS_ITS_CASES.format(folder=tmp_path))
    outcome = sanitize.run_tool(str(path), "memcheck", launched, 60)
    assert f"it checked all {len(names)} cases" in summary(launched, [outcome], "")


def test_the_outcomes_of_parallel_processes_are_combined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sanitize.os, "cpu_count", lambda: 2)
    path = Path(fake_sanitizer(tmp_path, MEMCHECK))
    path.write_text(PRINTS_ITS_CASES.format(folder=tmp_path))
    outcome = sanitize.run_tool(str(path), "memcheck", CASED, 10)
    assert outcome.checked == {"gelu bf16", "gelu fp32", "softmax bf16"} and outcome.failure is None
    assert outcome.errors == 10 and len(outcome.reports) == 2 * len(parse("memcheck", MEMCHECK, CASED).reports)


def test_a_process_without_a_summary_costs_its_own_cases() -> None:
    said = [
        Outcome("memcheck", (), 0, 0, None, frozenset({"gelu bf16", "softmax bf16"})),
        Outcome("memcheck", (), None, 0, "it died", frozenset()),
    ]
    text = summary(CASED, [sanitizer_log.joined(said)], "")
    assert "| gelu_forward_kernel | Triton | 2 | 0 | 0, 1 of 2 cases |" in text
    assert "- **it died**" in text and "1 cases were not checked**: `gelu fp32`" in text
    assert "it checked all" not in text


def test_the_errors_of_a_process_without_a_summary_count() -> None:
    died = replace(parse("racecheck", RACE, KERNELS), checked=frozenset())
    whole = sanitizer_log.joined([parse("racecheck", RACECHECK, KERNELS), died])
    assert died.errors is None and whole.errors == 2 and whole.unattributed == 0
    foreign = Outcome("racecheck", (), 3, 0, None, frozenset())
    assert sanitizer_log.joined([foreign, died]).unattributed == 3


def test_an_interrupt_ends_the_tools(tmp_path: Path) -> None:
    def interrupt() -> None:
        while not sanitize._RUNNING:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        sanitize.run_tool(fake_sanitizer(tmp_path, "", sleep=30), "memcheck", CASED, 60)
    assert time.monotonic() - began < 15


def test_no_case_starts_after_the_time_is_over(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made: list[str] = []
    now = [100.0]

    def case(name: str) -> tuple[str, sanitize.Call]:
        def call() -> None:
            made.append(name)
            now[0] += 10

        return name, call

    monkeypatch.setattr(sanitize, "cases", lambda device: iter([case("a"), case("b"), case("c"), case("d")]))
    monkeypatch.setattr(sanitize.time, "time", lambda: now[0])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    sanitize.launch_all(["a", "c"])
    assert made == ["a", "c"]
    made.clear()
    sanitize.launch_all(["a", "b", "c", "d"], until=now[0] + 15)
    assert made == ["a", "b"] and capsys.readouterr().out.split() == ["a", "c", "a", "b"]


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    names = dict.fromkeys(case for entry in CASED for case in entry.cases)
    monkeypatch.setattr(sanitize, "cases", lambda device: iter([(name, lambda: None) for name in names]))
    monkeypatch.setattr(sanitize, "_launched", lambda limit, names: CASED)


def test_the_summary_is_written_after_each_tool_and_after_an_interrupt(
    monkeypatch: pytest.MonkeyPatch, on_a_gpu: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "reports" / "sanitize.md"
    limits: list[float] = []

    def run_tool(sanitizer: str, tool: str, launched: list[Launched], limit: float, begin_for: float) -> Outcome:
        limits.extend([limit, begin_for])
        if tool == "racecheck":
            assert "- memcheck: 0 errors" in out.read_text()
            raise KeyboardInterrupt
        return Outcome(tool, (), 0, 0, None, frozenset({"gelu bf16", "gelu fp32", "softmax bf16"}))

    monkeypatch.setattr(sanitize, "run_tool", run_tool)
    arguments = ["--out", str(out), "--limit", "100", "--sanitizer", fake_sanitizer(tmp_path, "")]
    assert sanitize.main(arguments) == 1
    assert "racecheck was stopped by a signal" in out.read_text() == capsys.readouterr().out
    assert limits == pytest.approx([100, 37.5, 100, 75], abs=5)  # the second tool gets the first one's unused time


def test_exit_status_is_0_only_if_every_case_was_checked(
    monkeypatch: pytest.MonkeyPatch, on_a_gpu: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    every = {"gelu bf16", "gelu fp32", "softmax bf16"}
    checked = [every, every - {"gelu fp32"}]
    monkeypatch.setattr(
        sanitize, "run_tool", lambda sanitizer, tool, *rest: Outcome(tool, (), 0, 0, None, frozenset(checked[0]))
    )
    sanitizer = fake_sanitizer(tmp_path, "")
    assert sanitize.main(["--sanitizer", sanitizer]) == 0
    checked.pop(0)
    assert sanitize.main(["--sanitizer", sanitizer]) == 1
    assert "gelu_forward_kernel | Triton | 2 | 0 | 0, 1 of 2 cases" in capsys.readouterr().out
    monkeypatch.setattr(sanitize, "_launched", lambda limit, names: CASED[:1])
    assert sanitize.main(["--sanitizer", sanitizer]) == 1
    assert "2 of 3 cases were compiled in time (--limit); not: softmax bf16" in capsys.readouterr().out
