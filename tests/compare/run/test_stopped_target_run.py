"""A run for a GPU that is not there and is stopped: what its records rest on is written down before they are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from xlafuse.compare.graph import store
from xlafuse.compare.graph.model import FusionGraph
from xlafuse.compare.plan.selection import resolve
from xlafuse.compare.record import run_folder as record
from xlafuse.compare.record.record import Record
from xlafuse.compare.run import for_target
from xlafuse.compare.run.session import Session
from xlafuse.compare.spec.blocks import BLOCKS
from xlafuse.compare.workers.client import WorkerDied

GRAPH = store.to_json(FusionGraph("add", "xla", ()))


class Silent:
    def say(self, what: str) -> None: ...

    def done(self, record: Record) -> None: ...


class StoppingPool:
    """Compiles and checks whatever it is asked to, until the compile in which the run is stopped."""

    def __init__(self, stopped_at: str = "", without: str = "") -> None:
        self.stopped_at, self.without = stopped_at, without
        self.asked: list[tuple[str, str]] = []

    def ask(self, role: str, method: str, **params: Any) -> Any:
        self.asked.append((role, method))
        if method == "environment":
            if role == self.without:
                raise WorkerDied("the worker died")
            return {"worker": role}
        if method == "compile":
            if params["implementation"] == self.stopped_at:
                raise KeyboardInterrupt
            return {"compile_s": 0.5, "graph": GRAPH}
        if method == "produce":
            return {"out": {"rms": 1.0, "largest": 1.0, "independent_error": 0.1}}
        return {"errors": [], "device": "cpu", "backend": role} if method == "check" else None


def run(folder: Path, pool: StoppingPool) -> dict[str, Any]:
    """The workers that the run's segment has."""
    plan = resolve(
        ["vector_add"], suite="check", cases=["prime"], directions=["fwd"], implementations=["xla", "inductor", "cuda"]
    )
    record.create(folder, {"segments": []})
    session = Session(folder, folder / "scratch", pool, Silent(), {}, "h200")  # type: ignore[arg-type]
    try:
        for_target.run(plan, session)
    except KeyboardInterrupt:
        assert pool.stopped_at
    (segment,) = json.loads((folder / "run.json").read_text())["segments"]
    return dict(segment["environment"]["workers"])


def test_a_run_says_of_all_its_workers_what_they_are(tmp_path: Path) -> None:
    pool = StoppingPool(without="torch")
    workers = run(tmp_path, pool)
    assert list(workers.items()) == [
        ("target", {"worker": "target"}), ("torch", {"unavailable": "the worker died"}), ("xla", {"worker": "xla"}),
    ]
    assert pool.asked.count(("xla", "environment")) == 1


@pytest.mark.parametrize("stopped_at", ["inductor", "cuda"])
def test_a_run_that_is_stopped_says_what_the_workers_behind_its_records_were(tmp_path: Path, stopped_at: str) -> None:
    workers = run(tmp_path, StoppingPool(stopped_at))
    records = record.read_records(tmp_path)[0]
    assert records and stopped_at not in {each.implementation for each in records}
    for each in records:
        role = BLOCKS["vector_add"].implementation(each.implementation).backend.target_worker
        assert workers[role] == {"worker": role}
