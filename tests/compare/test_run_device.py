"""The run loop on a GPU, with a crew that answers from a script: what one implementation does costs itself alone."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from compare import record, run_device
from compare.client import WorkerDied, WorkerError, WorkerTimeout
from compare.graph import store
from compare.graph.model import Access, Buffer, FusionGraph, Kernel
from compare.record import Record
from compare.selection import resolve
from compare.session import Session

TIMES = {"device_time": [1e-6] * 5, "busy_time": [1e-6] * 5, "launches": 1, "poisoned": True}
TIMES["records"] = [{"name": "k", "start": 0.0, "end": 1e-6}]


GRAPH = store.to_json(
    FusionGraph(
        "add", "xla",
        (Kernel("k", "elementwise", runtime_name="k", inputs=(Access("x", 8),), outputs=(Access("y", 4),)),),
        buffers=(Buffer("x", (2,), "f32", 8, "input"), Buffer("y", (1,), "f32", 4, "output")),
    )
)


class ScriptedCrew:
    """Answers as workers would; `faults` maps (method, implementation) to (which call, exception)."""

    def __init__(self, faults: dict[tuple[str, str], tuple[int, Exception]]) -> None:
        self.faults, self.calls = faults, Counter[tuple[str, str]]()
        self.errors: dict[str, float] = {}
        self.programs: dict[str, set[str]] = {}  # by role: what its process holds

    def start(self, roles: set[str]) -> None: ...

    def ask(self, role: str, method: str, *, timeout: float = 0, **params: Any) -> Any:
        name = params.get("id", "").rpartition("/")[2]
        self.calls[method, name] += 1
        which, fault = self.faults.get((method, name), (0, None))
        held = self.programs.setdefault(role, set())
        if fault is not None and which == self.calls[method, name]:
            if not isinstance(fault, WorkerError):
                held.clear()
            raise fault
        if method in ("check", "measure") and name not in held:
            raise WorkerError("failed", f"KeyError: {name}")
        if method == "prepare":
            held.add(name)
            return {"compile_s": 0.5, "graph": GRAPH}
        if method == "check":
            error = self.errors.get(name, 0.1)
            errors = [{"name": "out", "error": error, "tolerance": 0.2}]
            return {"errors": errors, "device": "GPU", "backend": role}
        if method == "measure":
            first = {"peak_memory_bytes": {"forward": 7}} if params["first"] else {}
            return {"parts": {"forward": TIMES}, "wall_time": 2e-6, "calls": 3} | first
        answers: dict[str, Any] = {
            "environment": {"timer": "cupti", "device": "GPU"}, "ceilings": {"streams": {}, "products": {}},
            "device_properties": {"name": "GPU"}, "produce": {},
        }
        return answers.get(method)


class Silent:
    def say(self, what: str) -> None: ...

    def skip(self) -> None: ...

    def done(self, record: Record) -> None: ...


def run(folder: Path, crew: ScriptedCrew, *implementations: str) -> dict[str, Record]:
    plan = resolve(["vector_add"], suite="quick", cases=["prime"], implementations=implementations)
    record.create(folder, {"segments": []})
    run_device.environment(folder)
    session = Session(folder, folder / "scratch", crew, Silent(), {}, None)  # type: ignore[arg-type]
    run_device.run(plan, session)
    return {r.implementation: r for r in record.read_records(folder)[0]}


def test_all_is_well(tmp_path: Path) -> None:
    records = run(tmp_path, ScriptedCrew({}), "xla", "eager", "triton")
    assert {r.status for r in records.values()} == {"ok"} and len(records) == 3
    measured = records["triton"].measurement
    assert measured and len(measured["parts"]["forward"]["device_time"]) == run_device.ROUNDS
    assert measured["peak_memory_bytes"] == {"forward": 7} and measured["timer"] == "cupti"
    assert records["xla"].kernels["forward"] == {
        "launches": 1, "bytes_moved": 12, "provenance": {"": 1}, "unjoined": [],
    }
    graph = store.load(tmp_path / str(records["xla"].graph))
    assert graph.kernels and graph.kernels[0].device_time_us == pytest.approx(1.0)
    segment = json.loads((tmp_path / "run.json").read_text())["segments"][0]
    assert segment["id"] == records["xla"].segment and segment["ceilings"] == {"streams": {}, "products": {}}
    assert json.loads((tmp_path / "target" / "cuda_device_properties.json").read_text()) == {"name": "GPU"}


@pytest.mark.parametrize(
    ("method", "fault", "status", "reason"),
    [
        ("prepare", WorkerError("failed", "CompilationError: no"), "failed", "CompilationError"),
        ("prepare", WorkerError("skipped", "needs a newer driver"), "skipped", "newer driver"),
        ("prepare", WorkerDied("the torch worker died (signal SIGSEGV)"), "failed", "SIGSEGV"),
        ("check", WorkerError("wrong", "the call changed its inputs: x"), "wrong", "changed its inputs"),
        ("check", WorkerDied("the torch worker died (signal SIGSEGV)"), "failed", "SIGSEGV"),
        ("measure", WorkerTimeout("no answer within 300 s"), "timeout", "300 s"),
        ("measure", WorkerError("wrong", "timed call: out: error inf"), "wrong", "timed call"),
    ],
)
def test_a_fault_costs_its_own_record(
    tmp_path: Path, method: str, fault: Exception, status: str, reason: str
) -> None:
    records = run(tmp_path, ScriptedCrew({(method, "triton"): (1, fault)}), "xla", "eager", "triton")
    bad = records.pop("triton")
    assert bad.status == status and bad.detail and reason in bad.detail and bad.measurement is None
    assert {r.status for r in records.values()} == {"ok"} and len(records) == 2
    assert all(r.measurement for r in records.values())


def test_after_a_death_the_others_go_on_with_the_rounds_they_have(tmp_path: Path) -> None:
    crew = ScriptedCrew({("measure", "triton"): (3, WorkerDied("the torch worker died (signal SIGKILL)"))})
    records = run(tmp_path, crew, "xla", "eager", "triton")
    assert records["triton"].status == "failed"
    eager = records["eager"].measurement
    assert eager and len(eager["parts"]["forward"]["device_time"]) == run_device.ROUNDS
    assert crew.calls["prepare", "eager"] == 2  # again in the fresh process
    assert crew.calls["prepare", "xla"] == 1  # another process, untouched


def test_what_is_wrong_is_not_timed(tmp_path: Path) -> None:
    crew = ScriptedCrew({})
    crew.errors["triton"] = 0.3
    records = run(tmp_path, crew, "eager", "triton")
    assert records["triton"].status == "wrong" and "0.3" in str(records["triton"].detail)
    assert crew.calls["measure", "triton"] == 0 and crew.calls["measure", "eager"] == run_device.ROUNDS


def test_without_a_reference_every_record_says_so(tmp_path: Path) -> None:
    crew = ScriptedCrew({("produce", ""): (1, WorkerError("skipped", "torch is not installed"))})
    records = run(tmp_path, crew, "xla", "eager")
    assert {r.status for r in records.values()} == {"skipped"}
    assert all("no reference: torch is not installed" in str(r.detail) for r in records.values())


def test_autotuning_results_of_several_processes_become_one_file(tmp_path: Path) -> None:
    entry = "entries {{\n  key {{\n    hlo: {0}\n  }}\n  value {{\n    x: 1\n  }}\n}}\n"
    for process, key in ((11, "a"), (12, "b")):
        (tmp_path / f"autotune-0.11.2.{process}.textproto").write_text(entry.format(key))
    (tmp_path / "autotune-0.11.2.textproto").write_text(entry.format("c"))
    run_device._join_autotune_results(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["autotune-0.11.2.textproto"]
    text = (tmp_path / "autotune-0.11.2.textproto").read_text()
    assert all(f"hlo: {key}" in text for key in "abc")
