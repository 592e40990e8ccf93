"""A worker's service, with a framework that only notes what is asked of it."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from xlafuse.compare.measure.worker_backend import Program
from xlafuse.compare.record.record_fields import ErrorCheck
from xlafuse.compare.spec.blocks import BLOCKS
from xlafuse.compare.workers import service


class Noting:
    device, name = "none", "none"

    def __init__(self) -> None:
        self.asked: list[str] = []

    def clock(self) -> None:
        return None

    def build(self, *args: Any) -> Program:
        self.asked.append("build")
        return Program(lambda inputs: (inputs, None), None, 0.0, None)

    def release_memory(self, *, idle: bool) -> None:
        self.asked.append("give all back" if idle else "give back")


def test_a_right_program_is_rehearsed_before_it_is_timed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The check makes the first timed call, whose set-up takes long; without a clock there is no timed call."""
    verdicts = {"right": True, "wrong": False}
    rehearsed: list[str] = []

    def check(self: service.MeasuredProgram) -> list[Any]:
        return [ErrorCheck("out", error=0.0 if verdicts[self.case.name] else 1.0, tolerance=0.5)]

    monkeypatch.setattr(service.MeasuredProgram, "check", check)
    monkeypatch.setattr(service.MeasuredProgram, "call_as_timed", lambda self: rehearsed.append(self.case.name))
    case = BLOCKS["vector_add"].cpu_check_cases()[0]
    for clock in (None, object()):
        monkeypatch.setattr(Noting, "clock", lambda self, clock=clock: clock)
        worker = service.Service(Noting())  # type: ignore[arg-type]
        for name in verdicts:
            named = replace(case, name=name)
            worker.prepare(name, named.to_json(), "eager", [str(tmp_path)], str(tmp_path))
            worker.check(name)
    assert rehearsed == ["right"]


def test_memory_goes_back_before_others_need_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Memory of a compile, a check and a released program goes back: all runners share one GPU."""
    framework = Noting()
    monkeypatch.setattr(service.MeasuredProgram, "check", lambda self: framework.asked.append("check") or [])
    worker = service.Service(framework)  # type: ignore[arg-type]
    case = BLOCKS["vector_add"].cpu_check_cases()[0]
    worker.prepare("a", case.to_json(), "eager", [str(tmp_path)], str(tmp_path))
    worker.check("a", [{}])
    worker.release("a")
    assert framework.asked == ["build", "give back", "check", "give back", "give all back"]


def test_a_check_waits_for_the_artifacts_and_says_why_they_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(service.MeasuredProgram, "check", lambda self: [])
    worker = service.Service(Noting())  # type: ignore[arg-type]
    case = BLOCKS["vector_add"].cpu_check_cases()[0]
    worker.prepare("a", case.to_json(), "eager", [str(tmp_path)], str(tmp_path))
    written: Future[None] = Future()
    worker._programs["a"].program.artifacts = written
    with ThreadPoolExecutor(1) as threads:
        checked = threads.submit(worker.check, "a", [{}])
        with pytest.raises(TimeoutError):
            checked.result(0.05)
        written.set_exception(FileNotFoundError("cuobjdump is not on PATH"))
        with pytest.raises(FileNotFoundError, match="cuobjdump"):
            checked.result(20)
