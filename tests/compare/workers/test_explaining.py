"""The service of a compiling process, with a compiler that answers from a script."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from xlafuse.compare.graph import store
from xlafuse.compare.graph.model import FusionGraph
from xlafuse.compare.measure.clock import DeviceRecord, sample_of
from xlafuse.compare.measure.rounds import joined, summary
from xlafuse.compare.plan.paired_rounds import counted, median_us
from xlafuse.compare.workers.explaining import Answer, NotTimed, Service


class Scripted:
    """explain: called with a call's name. time: returns the rounds."""

    def __init__(self, explain: Callable[[str], list[str]], time: Callable[[], Mapping[str, Any]]) -> None:
        self._explain, self.time = explain, time

    def begin(self, request: dict[str, Any]) -> None: ...

    def explain(self, call: Mapping[str, Any], dumps: Path) -> Answer:
        check = {"error": 0.0, "dtype": "float32"} if call["name"] == "g" else None
        return Answer(FusionGraph(call["name"], "xla", ()), self._explain(call["name"]), check)


@pytest.fixture(autouse=True)
def _process_unchanged(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "path", [*sys.path])
    folder, environment = os.getcwd(), dict(os.environ)
    yield
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)


def asked(folder: Path, *names: str, timed: bool = False) -> str:
    request = {"path": [], "folder": str(folder), "timed": timed, "calls": [{"name": name} for name in names]}
    (folder / "request.pickle").write_bytes(pickle.dumps(request))
    return str(folder)


def test_graphs_notes_and_times_come_by_name(tmp_path: Path) -> None:
    calls = [[sample_of([DeviceRecord("k", 0.0, seconds)]) for seconds in (9e-6, 2e-6, 2e-6)]] * 5
    rounds = [summary(samples) | {"settled": True} for samples in calls]
    service = Service(lambda: Scripted(lambda name: [f"{name} is fine"], lambda: {"f": rounds, "g": rounds}))
    reply = service.explain(asked(tmp_path, "f", "g", timed=True))
    assert [store.load(Path(entry["file"])).name for entry in reply["graphs"]] == ["f", "g"]
    assert reply["notes"] == ["f is fine", "g is fine"]
    assert reply["checks"] == {"g": {"error": 0.0, "dtype": "float32"}}
    times = counted(joined(reply["rounds"]["g"]))  # the first call of a round does not count
    assert len(times.device_time) == 5 and median_us(times.device_time) == pytest.approx(2.0)


@pytest.mark.parametrize("kind", [NotTimed, SystemExit])
def test_a_timing_that_fails_becomes_a_note(tmp_path: Path, kind: type[BaseException]) -> None:
    def fails() -> Mapping[str, Any]:
        raise kind("no clock here")

    reply = Service(lambda: Scripted(lambda name: [], fails)).explain(asked(tmp_path, "f", timed=True))
    assert reply["rounds"] == {} and reply["notes"] == ["not timed: no clock here"] and len(reply["graphs"]) == 1


@pytest.mark.parametrize("kind", [ValueError, SystemExit])
def test_the_first_failure_is_the_answer_and_the_next_request_is_served(
    tmp_path: Path, kind: type[BaseException]
) -> None:
    def explain(name: str) -> list[str]:
        if name == "bad":
            raise kind("shapes differ\n\nand advice of many pages")
        return []

    service = Service(lambda: Scripted(explain, dict))
    error = service.explain(asked(tmp_path, "f", "bad", "g"))["error"]
    assert (error["name"], error["kind"], error["message"]) == ("bad", kind.__name__, "shapes differ")
    os.environ["LEFT_BY_A_CALL"] = "1"
    assert len(service.explain(asked(tmp_path, "g"))["graphs"]) == 1 and "LEFT_BY_A_CALL" not in os.environ


def test_a_framework_that_does_not_start_is_asked_for_again(tmp_path: Path) -> None:
    made: list[Scripted] = []

    def make() -> Scripted:
        if not made:
            made.append(Scripted(lambda name: [], dict))
            raise RuntimeError("needs ptxas")
        return made[0]

    service = Service(make)
    assert service.explain(asked(tmp_path, "f"))["error"]["message"] == "needs ptxas"
    assert len(service.explain(asked(tmp_path, "f"))["graphs"]) == 1
