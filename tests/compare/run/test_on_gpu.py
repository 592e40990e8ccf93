"""The run loop on a GPU, with a crew that answers from a script: what one implementation does costs itself alone."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from compare.base import host
from compare.base.usage import UsageError
from compare.graph import store
from compare.graph.model import Access, Buffer, FusionGraph, Kernel
from compare.measure import timeline
from compare.plan.selection import recorded_choices, resolve
from compare.plan.speedup import LEAST_ROUNDS
from compare.plan.timing_modes import Timing
from compare.record import run_folder as record
from compare.record.record import Record
from compare.record.run_folder import RunFolderError
from compare.report import rows
from compare.run import on_gpu, progress, room
from compare.run import run as run_module
from compare.run.clerk import Clerk
from compare.run.session import Session
from compare.spec.case import PARTS
from compare.workers import autotune_lock
from compare.workers.client import WorkerDied, WorkerError, WorkerTimeout

TIMES = {"device_time": [1e-6] * 5, "busy_time": [1e-6] * 5, "launches": 1, "poisoned": True}
TIMES["records"] = [{"name": "k", "start": 0.0, "end": 1e-6}]


WARM_UP = {"seconds": 0.01, "settled": True}
TRACE = {
    "returned": 5e-6,
    "host": [{"name": "cuLaunchKernel", "start": 1e-6, "end": 2e-6, "thread": 1, "correlation": 9}],
    "device": [
        {"name": "k", "start": 2e-6, "end": 3e-6, "grid": [1, 1, 1], "bytes": None, "stream": 7, "correlation": 9}
    ],
}
GRAPH = store.to_json(
    FusionGraph(
        "add", "xla",
        tuple(
            Kernel("k", "elementwise", part, runtime_name="k", inputs=(Access("x", 8),), outputs=(Access("y", 4),))
            for part in ("forward", "backward")
        ),
        buffers=(Buffer("x", (2,), "f32", 8, "input"), Buffer("y", (1,), "f32", 4, "output")),
    )
)


class ScriptedCrew:
    """Answers as workers would; `faults` maps (method, implementation) to (which call or calls, exception)."""

    def __init__(self, faults: dict[tuple[str, str], tuple[int | range, Exception]]) -> None:
        self.faults, self.calls = faults, Counter[tuple[str, str]]()
        self.errors: dict[str, float] = {}
        self.programs: dict[str, set[str]] = {}  # by role: what its process holds

        self.siblings: list[ScriptedCrew] = []
        self.faults_of_siblings: dict[tuple[str, str], tuple[int | range, Exception]] = {}
        self.scales: list[Any] = []  # of the references, as checks were told
        self.running = True  # its workers, from the beginning
        self.empty = False
        self.timer, self.jax = "cupti", "0.11.2"
        self.times = TIMES
        self.memory_bytes = 0  # of the GPU: room for one lane
        self.keeping: set[str] = set()  # roles whose processes keep too much of the GPU's memory
        self.may_keep = -1  # bytes, as it was last asked
        self.chosen: set[str] = set()  # roles whose choices of kernels are known to a later process
        self.measured: list[tuple[str, int]] = []  # what, on which input set, in order
        self.restarted: list[int] = []  # after how many of those

    def start(self, roles: set[str]) -> None:
        self.empty = False

    def dismiss(self, roles: set[str] | None = None) -> None:
        self.restarted.append(len(self.measured))
        self.chosen.add("xla")
        self.empty = roles is None
        for role in self.programs if roles is None else roles:
            self.programs.setdefault(role, set()).clear()
            self.keeping.discard(role)

    def has(self, role: str) -> bool:
        return self.running and not self.empty

    def sibling(self) -> ScriptedCrew:
        self.siblings.append(ScriptedCrew(self.faults_of_siblings))
        return self.siblings[-1]

    def ask(self, role: str, method: str, *, timeout: float = 0, **params: Any) -> Any:
        self.empty = False
        *_, direction, name = f"fwd/{params.get('id', '')}".split("/")
        parts = PARTS.get(direction, ())
        self.calls[method, name] += 1
        which, fault = self.faults.get((method, name), (0, None))
        held = self.programs.setdefault(role, set())
        if fault is not None and self.calls[method, name] in (which if isinstance(which, range) else (which,)):
            if not isinstance(fault, WorkerError):
                held.clear()
            raise fault
        if method in ("check", "measure", "measure_mode", "trace") and name not in held:
            raise WorkerError("failed", f"KeyError: {name}")
        if method == "draw":
            assert params["keep"], "the references are of these inputs"
        if method == "needs_restart":
            self.may_keep = params["kept"]
            return role in self.keeping
        if method == "prepare":
            if not params["tune"] and (name == "inductor-max" or (role == "xla" and role not in self.chosen)):
                raise WorkerError("untuned", "kernels would have to be timed")
            held.add(name)
            return {"compile_s": 0.5, "graph": GRAPH, "command_buffers": None}
        if method == "produce":
            scale = {"rms": 1.0, "largest": 2.0, "independent_error": 0.25 if params["seed"] else 0.5}
            return {"out": scale}
        if method == "check":
            self.scales.append(params["scales"])
            error = self.errors.get(name, 0.1)
            errors = [{"name": "out", "error": error, "tolerance": 0.2}]
            return {"errors": errors, "device": "GPU", "backend": role}
        if method == "measure":
            first: dict[str, Any] = {}
            if params["first"]:
                peak = {"forward": {"bytes": 7, "planned": 8, "reason": None}}
                first = {"peak_memory_bytes": {"forward": 7}, "peak_memory": peak}
            self.measured.append((name, params["input_set"]))
            name = "k of a later compile" if self.restarted else "k"
            times = self.times
            if self.timer == "cupti":
                times = times | {"records": [{"name": name, "start": 0.0, "end": 1e-6}]}
            return {"parts": dict.fromkeys(parts, times), "warm_up": WARM_UP, "wall_time": 2e-6, "calls": 3} | first
        if method == "measure_mode":
            self.measured.append((f"{name} {params['mode']}", params["input_set"]))
            if params["mode"] == "launches":
                return {"same_as": "cold"}
            return {"parts": dict.fromkeys(parts, self.times), "warm_up": WARM_UP, "command_buffers": None}
        answers: dict[str, Any] = {
            "environment": {
                "timer": self.timer, "device": "GPU", "memory_bytes": self.memory_bytes, "jax": self.jax,
            },
            "ceilings": {"streams": {}, "products": {}},
            "device_properties": {"name": "GPU"}, "calibrate": 1e-3,
            "trace": dict.fromkeys(parts, TRACE),
        }
        return answers.get(method)


class Silent:
    """Keeps what it was warned of."""

    def __init__(self) -> None:
        self.warnings: list[str] = []

    def say(self, what: str) -> None: ...

    def announce(self, what: str) -> None: ...

    def warn(self, what: str) -> None:
        self.warnings.append(what)

    def skip(self) -> None: ...

    def done(self, record: Record) -> None: ...


def run(
    folder: Path, crew: ScriptedCrew, *implementations: str, timing: Timing | None = None,
    blocks: tuple[str, ...] = ("vector_add",), case: str = "prime", directions: tuple[str, ...] = (),
    said: Silent | None = None,
) -> dict[str, Record]:
    plan = resolve(blocks, suite="quick", cases=[case], implementations=implementations, directions=directions)
    plan = replace(plan, timing=timing or Timing())
    record.create(folder, {"segments": []})
    on_gpu.environment(folder)
    session = Session(folder, folder / "scratch", crew, said or Silent(), {}, None)  # type: ignore[arg-type]
    on_gpu.run(plan, session)
    found = record.read_records(folder)[0]
    return {r.implementation if len(blocks) == 1 else r.id: r for r in found}


def test_all_is_well(tmp_path: Path) -> None:
    records = run(tmp_path, ScriptedCrew({}), "xla", "eager", "triton")
    assert {r.status for r in records.values()} == {"ok"} and len(records) == 3
    measured = records["triton"].measurement
    assert measured and len(measured["parts"]["forward"]["device_time"]) == LEAST_ROUNDS
    assert measured["peak_memory_bytes"] == {"forward": 7} and measured["timer"] == "cupti"
    assert records["xla"].kernels["forward"] == {
        "launches": 1, "bytes_moved": 12, "provenance": {"": 1}, "unjoined": [],
    }
    graph = store.load(tmp_path / str(records["xla"].graph))
    assert graph.kernels and graph.kernels[0].device_time_us == pytest.approx(1.0)
    segment = json.loads((tmp_path / "run.json").read_text())["segments"][0]
    assert segment["id"] == records["xla"].segment and segment["ceilings"] == {"streams": {}, "products": {}}
    assert json.loads((tmp_path / "target" / "cuda_device_properties.json").read_text()) == {"name": "GPU"}


def test_without_cupti_a_record_says_nothing_of_single_kernels(tmp_path: Path) -> None:
    crew = ScriptedCrew({})
    crew.timer, crew.times = "cuda-events", TIMES | {"busy_time": None, "launches": None, "records": None}
    eager = run(tmp_path, crew, "eager", timing=Timing(("warm",)))["eager"]
    assert eager.status == "ok" and eager.trace is None and eager.measurement
    for parts in (eager.measurement["parts"], eager.measurement["modes"]["warm"]["parts"]):
        assert len(parts["forward"]["device_time"]) == LEAST_ROUNDS
        assert (parts["forward"]["busy_time"], parts["forward"]["launches"]) == (None, None)
    assert eager.measurement["parts"]["forward"]["records"] is None
    (row,) = rows.read(tmp_path).rows
    assert (row["kernels"], row["kernel_source"], row["launch_gap"]) == (1, "compiler", None)


@pytest.mark.parametrize(
    ("method", "fault", "warning"),
    [
        ("ceilings", WorkerError("failed", "no memory\nfor streams"), "this GPU's ceilings could not be measured: "),
        ("device_properties", WorkerDied("SIGSEGV"), "this GPU's device properties could not be measured: "),
        ("calibrate", WorkerDied("SIGSEGV"), "the torch worker's clock could not be calibrated: no ratio"),
    ],
)
def test_what_is_not_known_of_the_gpu_costs_what_rests_on_it_and_is_said(
    tmp_path: Path, method: str, fault: Exception, warning: str
) -> None:
    said = Silent()
    records = run(tmp_path, ScriptedCrew({(method, ""): (1, fault)}), "xla", "triton", said=said)
    assert {r.status for r in records.values()} == {"ok"}
    assert len(said.warnings) == 1 and said.warnings[0].startswith(warning) and str(fault) in said.warnings[0]
    (segment,) = json.loads((tmp_path / "run.json").read_text())["segments"]
    assert segment["environment"]["workers"]["torch"]["timer"] == "cupti"
    assert (segment["ceilings"] is None) == (method == "ceilings")
    triton = records["triton"]
    assert triton.trace and triton.measurement and triton.measurement["timer"] == "cupti"
    assert triton.kernels["forward"]["unjoined"] == []
    left = {path.name for path in (tmp_path / "target").glob("*.json")}
    missing = {"ceilings": "ceilings.json", "device_properties": "cuda_device_properties.json"}.get(method)
    assert left == {"ceilings.json", "cuda_device_properties.json"} - {missing}
    read = rows.read(tmp_path)
    assert [w.partition("run.json: ")[2] for w in read.warnings] == (
        ["segment s1: the clock of the worker torch could not be calibrated: no ratio between workers is given"]
        if method == "calibrate" else []
    )
    row = next(row for row in read.rows if row["implementation"] == "triton")
    assert (row["time_vs_xla"] is None) == (method == "calibrate")  # clocks that were not seen to agree
    assert segment.get("uncalibrated") == (["torch"] if method == "calibrate" else None)


def test_clocks_that_differ_are_said_in_the_run_and_in_its_reports(tmp_path: Path) -> None:
    class Apart(ScriptedCrew):
        def ask(self, role: str, method: str, *, timeout: float = 0, **params: Any) -> Any:
            answer = super().ask(role, method, timeout=timeout, **params)
            return answer * 1.03 if method == "calibrate" and role == "xla" else answer

    said = Silent()
    run(tmp_path, Apart({}), "xla", "triton", said=said)
    assert said.warnings == ["the workers' clocks differ by 3.0%: no ratio between them will be given"]
    read = rows.read(tmp_path)
    assert [row["time_vs_xla"] for row in read.rows if row["implementation"] == "triton"] == [None]
    assert read.warnings == [
        f"{tmp_path / 'run.json'}: segment s1: the workers' clocks differ by 3.0%: no ratio between workers is given"
    ]


def test_choices_of_another_jax_are_said_not_to_serve(tmp_path: Path) -> None:
    (tmp_path / "target" / "xla").mkdir(parents=True)
    (tmp_path / "target" / "xla" / "autotune-0.11.2.textproto").write_text("")
    crew, said = ScriptedCrew({}), Silent()
    crew.jax = "0.10.2"
    run(tmp_path, crew, "xla", said=said)
    assert said.warnings == ["XLA's recorded choices are of jax 0.11.2, and this is 0.10.2: it tunes all anew"]


def test_a_worker_that_cannot_start_is_said_to_be_none(tmp_path: Path) -> None:
    said = Silent()
    fault = WorkerError("failed", "ModuleNotFoundError: torch")
    run(tmp_path, ScriptedCrew({("environment", ""): (1, fault)}), "xla", "triton", said=said)  # torch's comes first
    assert said.warnings == ["the torch worker is not available: ModuleNotFoundError: torch"]
    (segment,) = json.loads((tmp_path / "run.json").read_text())["segments"]
    assert segment["environment"]["workers"]["torch"] == {"unavailable": "ModuleNotFoundError: torch"}


def test_a_warning_is_a_line_on_a_terminal_and_without_one(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for terminal in (False, True):
        monkeypatch.setattr(progress.sys.stderr, "isatty", lambda terminal=terminal: terminal)
        with progress.Progress(1) as shown:
            shown.warn("clocks [differ]:\nno ratio")
            shown.say("timing")
        assert "clocks [differ]: no ratio\n" in capfd.readouterr().err


def test_every_input_set_is_judged_by_the_one_where_plain_code_errs_most(tmp_path: Path) -> None:
    crew = ScriptedCrew({})
    run(tmp_path, crew, "xla", "triton")
    assert crew.scales == [[{"out": {"rms": 1.0, "largest": 2.0, "independent_error": 0.5}}] * 2] * 2


def test_a_worker_in_the_only_lane_may_keep_the_gpu_s_memory(tmp_path: Path) -> None:
    crew = ScriptedCrew({})
    crew.keeping.add("xla")
    records = run(tmp_path, crew, "xla", "eager")
    assert crew.restarted == [] and crew.calls["needs_restart", ""] == 0
    assert {r.status for r in records.values()} == {"ok"}


@pytest.mark.parametrize(
    ("method", "fault", "status", "reason"),
    [
        ("prepare", WorkerError("failed", "CompilationError: no"), "failed", "CompilationError"),
        ("prepare", WorkerError("skipped", "needs a newer driver"), "skipped", "newer driver"),
        ("prepare", WorkerDied("the torch worker died (signal SIGSEGV)"), "failed", "SIGSEGV"),
        ("prepare", WorkerTimeout("no answer within 300 s"), "timeout", "300 s"),
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
    assert eager and len(eager["parts"]["forward"]["device_time"]) == LEAST_ROUNDS
    assert crew.calls["prepare", "eager"] == 2  # again in the fresh process
    assert crew.calls["prepare", "xla"] == 2  # left for its turn, and in it; another process, untouched


LOST = WorkerDied("the torch worker died (signal SIGSEGV)")


@pytest.mark.parametrize(
    ("faults", "failed"),
    [
        ({("prepare", "triton"): (2, LOST)}, {"triton"}),
        ({("prepare", "inductor-max"): (4, LOST)}, {"inductor-max"}),
        ({("check", "triton"): (1, LOST), ("prepare", "inductor"): (2, LOST)}, {"triton", "inductor"}),
    ],
    ids=["in a fresh process", "tuning in a fresh process", "of being revived"],
)
def test_a_second_death_costs_its_own_record_too(
    tmp_path: Path, faults: dict[tuple[str, str], tuple[int, Exception]], failed: set[str]
) -> None:
    names = ("eager", "inductor", "triton", "inductor-max")
    crew = ScriptedCrew(faults)
    records = run(
        tmp_path, crew, *names, timing=Timing(restarts=1), blocks=("linear",), case="llama-8b-out", directions=("fwd",)
    )
    assert {name: r.status for name, r in records.items()} == {
        name: "failed" if name in failed else "ok" for name in names
    }
    assert {r.detail for r in records.values() if r.status == "failed"} == {str(LOST)}


def test_a_worker_that_will_not_tune_has_failed(tmp_path: Path) -> None:
    crew = ScriptedCrew({("prepare", "xla"): (2, WorkerError("untuned", "not even now"))})
    records = run(tmp_path, crew, "xla", "eager")
    assert records["xla"].status == "failed" and "not even now" in str(records["xla"].detail)
    assert records["eager"].status == "ok"


def test_what_is_wrong_is_not_timed(tmp_path: Path) -> None:
    crew = ScriptedCrew({})
    crew.errors["triton"] = 0.3
    records = run(tmp_path, crew, "eager", "triton")
    assert records["triton"].status == "wrong" and "0.3" in str(records["triton"].detail)
    assert crew.calls["measure", "triton"] == 0 and crew.calls["measure", "eager"] == LEAST_ROUNDS


def test_without_a_reference_every_record_says_so(tmp_path: Path) -> None:
    crew = ScriptedCrew({("produce", ""): (1, WorkerError("skipped", "torch is not installed"))})
    records = run(tmp_path, crew, "xla", "eager")
    assert {r.status for r in records.values()} == {"skipped"}
    assert all("no reference: torch is not installed" in str(r.detail) for r in records.values())


def test_autotuning_results_of_several_processes_become_one_file(tmp_path: Path) -> None:
    entry = "entries {{\n  key {{\n    hlo: {0}\n  }}\n  value {{\n    x: 1\n  }}\n}}\n"
    gone = [subprocess.Popen([sys.executable, "-c", ""]) for _ in range(2)]
    for process in gone:
        process.wait()
    numbers = {"a": gone[0].pid, "b": gone[1].pid, "d": os.getpid()}
    for key, number in numbers.items():
        (tmp_path / f"autotune-0.11.2.{number}.textproto").write_text(entry.format(key))
    joined, running = tmp_path / "autotune-0.11.2.textproto", tmp_path / f"autotune-0.11.2.{os.getpid()}.textproto"
    joined.write_text(entry.format("c"))
    on_gpu._join_autotune_results(tmp_path)
    assert {*tmp_path.iterdir()} == {joined, running}  # which it may be writing again
    assert [key for key in "abcd" if f"hlo: {key}" in joined.read_text()] == ["a", "b", "c"]
    on_gpu._join_autotune_results(tmp_path, running=True)
    assert [*tmp_path.iterdir()] == [joined]
    assert all(f"hlo: {key}" in joined.read_text() for key in "abcd")


def test_each_record_names_its_timeline(tmp_path: Path) -> None:
    for found in run(tmp_path, ScriptedCrew({}), "xla", "triton").values():
        assert found.trace and list(found.trace) == ["file"]
        document = timeline.load(tmp_path / found.trace["file"])
        assert document["otherData"]["records"] == [found.id]
        (kernel,) = [event for event in document["traceEvents"] if event.get("cat") == "kernel"]
        assert kernel["args"]["bytes_read"] == 8 and kernel["ts"] == 1  # the graph's; a microsecond after the launch
        assert found.measurement and found.measurement["peak_memory"]["forward"]["planned"] == 8


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (WorkerError("failed", "RuntimeError: CUPTI_ERROR_UNKNOWN"), "RuntimeError: CUPTI_ERROR_UNKNOWN"),
        (WorkerDied("the torch worker died (signal SIGSEGV)"), "/eager was traced: the torch worker died"),
    ],
)
def test_a_timeline_that_fails_costs_no_time(tmp_path: Path, fault: Exception, reason: str) -> None:
    crew = ScriptedCrew({("trace", "eager"): (1, fault)})
    records = run(tmp_path, crew, "xla", "eager", "triton")
    assert {r.status for r in records.values()} == {"ok"} and all(r.measurement for r in records.values())
    eager, triton, xla = (records[name].trace or {} for name in ("eager", "triton", "xla"))
    assert reason in eager["unavailable"] and "file" in xla
    assert ("unavailable" in triton) == isinstance(fault, WorkerDied)  # its program died with the worker


def test_each_round_visits_every_mode_on_another_input_set(tmp_path: Path) -> None:
    crew = ScriptedCrew({})
    records = run(tmp_path, crew, "xla", "triton", timing=Timing(("warm", "graph", "launches")))
    assert crew.measured[:8] == [
        ("xla", 0), ("triton", 0), ("xla warm", 0), ("triton warm", 0), ("xla graph", 0), ("triton graph", 0),
        ("xla launches", 0), ("triton launches", 0),
    ]
    assert crew.measured[8:12] == [("triton", 1), ("xla", 1), ("triton warm", 1), ("xla warm", 1)]
    assert crew.calls["measure_mode", "triton"] == 2 * LEAST_ROUNDS + 1  # what is the main mode again is asked for once
    measured = records["triton"].measurement
    assert measured and set(measured["modes"]) == {"warm", "graph", "launches"}
    assert len(measured["modes"]["graph"]["parts"]["forward"]["device_time"]) == LEAST_ROUNDS
    assert measured["modes"]["launches"] == {"same_as": "cold"}
    assert measured["warm_up"] == {"seconds": [0.01] * LEAST_ROUNDS, "settled": [True] * LEAST_ROUNDS}
    assert measured["processes"] == [0] * LEAST_ROUNDS and measured["command_buffers"] is None


@pytest.mark.parametrize(
    "fault",
    [WorkerError("failed", "CaptureFailed: no CUDA graph"), WorkerDied("CaptureFailed: no CUDA graph; after it ...")],
)
def test_a_mode_that_cannot_be_had_costs_itself(tmp_path: Path, fault: Exception) -> None:
    crew = ScriptedCrew({("measure_mode", "triton"): (2, fault)})  # the first round's second mode
    records = run(tmp_path, crew, "xla", "eager", "triton", timing=Timing(("warm", "graph")))
    assert {r.status for r in records.values()} == {"ok"}
    measured = records["triton"].measurement
    assert measured and "no CUDA graph" in measured["modes"]["graph"]["unavailable"]
    assert len(measured["modes"]["warm"]["parts"]["forward"]["device_time"]) == LEAST_ROUNDS
    assert len(measured["parts"]["forward"]["device_time"]) == LEAST_ROUNDS
    assert crew.calls["measure_mode", "triton"] == LEAST_ROUNDS + 1  # asked for once
    died = isinstance(fault, WorkerDied)
    assert crew.calls["prepare", "eager"] == crew.calls["prepare", "triton"] == (2 if died else 1)


def test_a_wrong_result_of_a_repeated_call_is_wrong(tmp_path: Path) -> None:
    crew = ScriptedCrew({("measure_mode", "triton"): (1, WorkerError("wrong", "timed call: out: error inf"))})
    records = run(tmp_path, crew, "xla", "triton", timing=Timing(("warm",)))
    assert records["triton"].status == "wrong" and records["xla"].status == "ok"


def test_fresh_workers_take_their_share_of_the_rounds(tmp_path: Path) -> None:
    crew = ScriptedCrew({})
    records = run(tmp_path, crew, "xla", "triton", timing=Timing(restarts=2))
    assert crew.restarted == [4, 8]  # two rounds of two implementations each
    assert crew.calls["prepare", "triton"] == 3 and crew.calls["check", "triton"] == 1
    for entry in records.values():
        assert entry.status == "ok" and entry.measurement and entry.measurement["processes"] == [0, 0, 1, 1, 2, 2]
        assert entry.measurement["parts"]["forward"]["records"][0]["name"] == "k"  # of the compile that is described
        assert entry.kernels["forward"]["unjoined"] == []


def test_an_implementation_that_cannot_be_prepared_again_costs_itself(tmp_path: Path) -> None:
    crew = ScriptedCrew({("prepare", "triton"): (2, WorkerError("failed", "OutOfMemoryError"))})
    records = run(tmp_path, crew, "xla", "triton", timing=Timing(restarts=1))
    assert records["triton"].status == "failed" and "OutOfMemory" in str(records["triton"].detail)
    assert records["xla"].status == "ok"


THREE = ("gelu", "rmsnorm", "swiglu")  # with two directions each
NO_MEMORY = WorkerError("failed", "OutOfMemoryError: CUDA out of memory")
DIED = WorkerDied("the torch worker died (signal SIGSEGV)")


@pytest.fixture
def lanes(monkeypatch: pytest.MonkeyPatch) -> ScriptedCrew:
    monkeypatch.setattr(host, "usable_cores", lambda: 3)
    monkeypatch.setattr(on_gpu, "READY_SHARE", 1.0)  # who is ready first waits for the other: one order of records
    crew = ScriptedCrew({})
    crew.memory_bytes = 140 << 30  # for four lanes, but there are cores for two
    return crew


def test_groups_share_out_the_lanes_and_directions_stay_together(tmp_path: Path, lanes: ScriptedCrew) -> None:
    records = run(tmp_path, lanes, "xla", "triton", blocks=THREE)
    assert len(records) == 12 and {r.status for r in records.values()} == {"ok"}
    (sibling,) = lanes.siblings
    assert lanes.calls["produce", ""] == 2 * 2 and sibling.calls["produce", ""] == 2  # two input sets a group
    assert lanes.calls["check", "triton"] == 4 and sibling.calls["check", "triton"] == 2
    assert sibling.calls["environment", ""] == sibling.calls["ceilings", ""] == 0
    segment = json.loads((tmp_path / "run.json").read_text())["segments"][0]
    assert segment["lanes"] == 2 and set(segment["clocks"]) == {"torch", "xla", "torch 2", "xla 2"}
    ids = [json.loads(line)["id"] for line in (tmp_path / "records.jsonl").read_text().splitlines()]
    # Of a batch the first, which needs most memory, is timed last; gelu, of fewest tensors, has least to compile.
    assert [name.split("/")[0] for name in ids] == ["rmsnorm"] * 4 + ["swiglu"] * 4 + ["gelu"] * 4


def test_without_knowing_the_memory_there_is_one_lane(tmp_path: Path, lanes: ScriptedCrew) -> None:
    lanes.memory_bytes = 0
    run(tmp_path, lanes, "xla", blocks=THREE)
    assert lanes.siblings == []


@pytest.mark.parametrize("method", ["prepare", "measure"])
def test_what_found_no_memory_beside_others_is_tried_again(
    tmp_path: Path, lanes: ScriptedCrew, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first lane's first group, swiglu, is the one that starves."""
    monkeypatch.setattr(on_gpu, "_end_idle", lambda lanes, session: False)
    lanes.faults = {(method, "triton"): (1, NO_MEMORY)}
    records = run(tmp_path, lanes, "xla", "triton", blocks=THREE)
    assert len(records) == 12 and {r.status for r in records.values()} == {"ok"}
    ids = [json.loads(line)["id"] for line in (tmp_path / "records.jsonl").read_text().splitlines()]
    assert [name.split("/")[0] for name in ids] == ["rmsnorm"] * 4 + ["gelu"] * 4 + ["swiglu"] * 4
    assert not lanes.restarted and not lanes.siblings[0].restarted


@pytest.mark.parametrize(("method", "fault"), [("check", NO_MEMORY), ("measure", NO_MEMORY), ("measure", DIED)])
def test_nothing_is_compiled_again_while_its_artifacts_are_packed(
    tmp_path: Path, lanes: ScriptedCrew, monkeypatch: pytest.MonkeyPatch, method: str, fault: Exception
) -> None:
    """Where it found no memory and is tried again, or its worker died while it was timed."""
    monkeypatch.setattr(on_gpu, "_end_idle", lambda lanes, session: False)
    lanes.faults = {(method, "triton"): (1, fault)}
    packing: list[str] = []
    met: list[str] = []
    answer = ScriptedCrew.ask

    def pack(session: Session, entry: Record) -> None:
        packing.append(entry.id)
        time.sleep(0.05)
        packing.remove(entry.id)

    def watch(crew: ScriptedCrew, role: str, method: str, **params: Any) -> Any:
        if method == "prepare":
            met.append(params["id"])
            assert params["id"] not in packing
        return answer(crew, role, method, **params)

    monkeypatch.setattr(Session, "archive", pack)
    monkeypatch.setattr(ScriptedCrew, "ask", watch)
    run(tmp_path, lanes, "eager", "triton", blocks=THREE)
    assert len(met) > len({*met})  # some were


@pytest.mark.parametrize("method", ["prepare", "measure"])
def test_what_found_no_memory_beside_others_twice_is_done_again_alone(
    tmp_path: Path, lanes: ScriptedCrew, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on_gpu, "_end_idle", lambda lanes, session: False)
    lanes.faults = {(method, "triton"): (range(1, 4), NO_MEMORY)}
    records = run(tmp_path, lanes, "xla", "triton", blocks=THREE)
    assert len(records) == 12 and {r.status for r in records.values()} == {"ok"}
    ids = [json.loads(line)["id"] for line in (tmp_path / "records.jsonl").read_text().splitlines()]
    assert [name.split("/")[0] for name in ids] == ["rmsnorm"] * 4 + ["gelu"] * 4 + ["swiglu"] * 4
    assert lanes.restarted and lanes.siblings[0].restarted  # every process gave its memory back first


def test_what_finds_no_memory_to_be_timed_goes_on_with_that_of_those_who_are_done(
    tmp_path: Path, lanes: ScriptedCrew
) -> None:
    lanes.faults = {("measure", "triton"): (3, NO_MEMORY)}
    records = run(tmp_path, lanes, "xla", "triton", blocks=THREE)
    ids = [json.loads(line)["id"] for line in (tmp_path / "records.jsonl").read_text().splitlines()]
    assert [name.split("/")[0] for name in ids] == ["rmsnorm"] * 4 + ["swiglu"] * 4 + ["gelu"] * 4
    rounds = {len(r.measurement["parts"]["forward"]["device_time"]) for r in records.values() if r.measurement}
    assert rounds == {LEAST_ROUNDS} and {r.status for r in records.values()} == {"ok"} and len(records) == 12
    assert lanes.siblings[0].restarted and not lanes.restarted
    assert lanes.calls["prepare", "triton"] == 4  # of two groups in two directions: none again


@pytest.mark.parametrize("method", ["measure_mode", "trace"])
def test_what_finds_no_memory_in_another_mode_or_to_be_traced_finds_that_of_those_who_are_done(
    tmp_path: Path, lanes: ScriptedCrew, method: str
) -> None:
    lanes.faults = {(method, "triton"): (1, NO_MEMORY)}
    records = run(tmp_path, lanes, "xla", "triton", timing=Timing(("warm",)), blocks=THREE)
    assert len(records) == 12 and all(r.trace and "file" in r.trace for r in records.values())
    assert all("unavailable" not in r.measurement["modes"]["warm"] for r in records.values() if r.measurement)
    assert len(lanes.siblings[0].restarted) == 1 and not lanes.restarted


def test_lanes_without_a_group_make_room_too(tmp_path: Path, lanes: ScriptedCrew) -> None:
    """Two lanes, three groups: the third has the first lane."""
    lanes.faults = {("measure", "triton"): (4 * LEAST_ROUNDS, NO_MEMORY)}
    records = run(tmp_path, lanes, "xla", "triton", blocks=THREE)
    assert len(records) == 12 and {r.status for r in records.values()} == {"ok"}
    assert len(lanes.siblings[0].restarted) == 1 and not lanes.restarted


def test_who_makes_room_twice_has_nothing_left(tmp_path: Path, lanes: ScriptedCrew) -> None:
    """What fails all the same is done again twice, alone at last, and then has failed."""
    lanes.faults = {("measure", "triton"): (range(1, 99), NO_MEMORY)}
    records = run(tmp_path, lanes, "xla", "triton", blocks=("rmsnorm", "swiglu"))
    assert [r.id for r in records.values() if r.status != "ok"] == [
        "swiglu/prime/fp32/fwd/triton", "swiglu/prime/fp32/train/triton"
    ]
    assert lanes.calls["measure", "triton"] == 2 * 3 + 2 - 1  # two directions, three times; once with room made


@pytest.mark.parametrize("restarts", [0, 2])
def test_who_wants_for_memory_holds_none_that_others_need(
    tmp_path: Path, lanes: ScriptedCrew, restarts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sibling's group, rmsnorm, starves when it is checked; the first lane's, swiglu, when it is timed."""
    asked: list[tuple[str, str]] = []

    def note(crew: ScriptedCrew, role: str, method: str, **params: Any) -> Any:
        asked.append((method, params.get("id", "").split("/")[0]))
        return answer(crew, role, method, **params)

    answer = ScriptedCrew.ask
    monkeypatch.setattr(ScriptedCrew, "ask", note)
    lanes.faults_of_siblings = {("check", "triton"): (1, NO_MEMORY)}
    lanes.faults = {("measure", "triton"): (1, NO_MEMORY)}
    records = run(tmp_path, lanes, "xla", "triton", timing=Timing(restarts=restarts), blocks=("rmsnorm", "swiglu"))
    assert len(records) == 8 and {r.status for r in records.values()} == {"ok"}
    ids = [json.loads(line)["id"] for line in (tmp_path / "records.jsonl").read_text().splitlines()]
    assert [name.split("/")[0] for name in ids] == ["swiglu"] * 4 + ["rmsnorm"] * 4
    assert asked.index(("release", "rmsnorm")) < asked.index(("measure", "swiglu"))


def test_one_group_at_a_time_is_not_alone_while_other_lanes_have_processes(
    tmp_path: Path, lanes: ScriptedCrew, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "SMALL_BYTES", 0)
    monkeypatch.setattr(room, "TRAINED_COPIES", 1 << 30)  # two lanes, and room for a group in one
    lanes.faults = {("prepare", "triton"): (1, NO_MEMORY)}
    records = run(tmp_path, lanes, "xla", "triton", blocks=THREE)
    assert len(records) == 12 and {r.status for r in records.values()} == {"ok"}
    assert lanes.restarted and lanes.siblings[0].restarted


def test_memory_that_is_kept_goes_back_before_the_next_groups_also_from_lanes_without_one(
    tmp_path: Path, lanes: ScriptedCrew, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two lanes and three groups."""

    def keep(crew: ScriptedCrew, role: str, method: str, **params: Any) -> Any:
        if method == "measure" and role == "xla":
            crew.keeping.add(role)
        return answer(crew, role, method, **params)

    answer = ScriptedCrew.ask
    monkeypatch.setattr(ScriptedCrew, "ask", keep)
    run(tmp_path, lanes, "xla", "triton", blocks=THREE)
    (sibling,) = lanes.siblings
    assert len(lanes.restarted) == len(sibling.restarted) == 1 and sibling.keeping == set() and lanes.keeping == {"xla"}
    assert lanes.may_keep == sibling.may_keep == room.KEPT_BYTES


def test_a_worker_that_is_not_there_is_not_started_to_be_asked_what_it_keeps(
    tmp_path: Path, lanes: ScriptedCrew
) -> None:
    lanes.running = False
    run(tmp_path, lanes, "xla", blocks=THREE)
    assert lanes.calls["needs_restart", ""] == 0


def test_a_worker_that_dies_of_being_asked_what_it_keeps_costs_nothing(tmp_path: Path, lanes: ScriptedCrew) -> None:
    lanes.faults = {("needs_restart", ""): (1, WorkerDied("killed"))}
    assert {r.status for r in run(tmp_path, lanes, "xla", blocks=THREE).values()} == {"ok"}
    assert lanes.calls["needs_restart", ""] > 1


def test_what_finds_no_memory_alone_has_failed(tmp_path: Path) -> None:
    crew = ScriptedCrew({("prepare", "triton"): (1, NO_MEMORY)})
    records = run(tmp_path, crew, "xla", "triton")
    assert records["triton"].status == "failed" and records["xla"].status == "ok"


def test_every_lane_starts_fresh_workers(tmp_path: Path, lanes: ScriptedCrew) -> None:
    records = run(tmp_path, lanes, "xla", "triton", timing=Timing(restarts=1), blocks=("gelu", "swiglu"))
    assert {tuple(r.measurement["processes"]) for r in records.values() if r.measurement} == {(0, 0, 0, 1, 1)}
    assert len(lanes.restarted) == len(lanes.siblings[0].restarted) == 1


class WatchedCrew(ScriptedCrew):
    """Takes a while to answer, and notes what was asked meanwhile; siblings share the notes."""

    def __init__(self, under_way: list[str], met: dict[str, set[str]], lock: Path) -> None:
        super().__init__({})
        self.under_way, self.met, self.lock = under_way, met, lock
        self.memory_bytes = 140 << 30

    def sibling(self) -> ScriptedCrew:
        self.siblings.append(WatchedCrew(self.under_way, self.met, self.lock))
        return self.siblings[-1]

    def ask(self, role: str, method: str, *, timeout: float = 0, **params: Any) -> Any:
        with autotune_lock.alone(self.lock) if params.get("tune") else contextlib.nullcontext():
            return self._watched(role, method, **params)

    def _watched(self, role: str, method: str, **params: Any) -> Any:
        what = f"{'tune' if params.get('tune') else method} {params.get('id', '').rpartition('/')[2]}"
        self.met.setdefault(what, set()).update(self.under_way)
        self.under_way.append(what)
        time.sleep(0.01)
        for other in self.under_way:
            if other != what:
                self.met[other].add(what)
        try:
            return super().ask(role, method, **params)
        finally:
            self.under_way.remove(what)


def test_a_few_go_on_compiling_beside_what_is_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a compiler makes, that is, and nothing that runs on the GPU for longer than a call."""
    monkeypatch.setattr(host, "usable_cores", lambda: 10)
    met: dict[str, set[str]] = {"prepare inductor": set()}
    answer = WatchedCrew._watched

    def slowly(crew: WatchedCrew, role: str, method: str, **params: Any) -> Any:
        if method == "prepare" and params["implementation"] == "inductor" and "swiglu" in params["id"]:
            crew.under_way.append("prepare inductor")
            time.sleep(0.5)
            crew.under_way.remove("prepare inductor")
        return answer(crew, role, method, **params)

    monkeypatch.setattr(WatchedCrew, "_watched", slowly)
    names = ("xla", "eager", "inductor", "triton")
    crew = WatchedCrew([], met, autotune_lock.lock_of(tmp_path))
    crew.chosen.add("xla")
    records = run(tmp_path, crew, *names, blocks=("gelu", "swiglu", "rmsnorm", "softmax", "layernorm", "geglu"))
    assert {r.status for r in records.values()} == {"ok"}
    beside = set().union(*(met[f"measure {name}"] for name in names))
    assert beside and beside <= {"prepare inductor", "prepare xla"}
    assert json.loads((tmp_path / "run.json").read_text())["segments"][0]["compiling_beside"] == 1


@pytest.mark.parametrize("restarts", [0, 1])
def test_what_is_timed_has_the_gpu_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restarts: int
) -> None:
    """Workers that tune do so under the lock (compare.workers.autotune_lock); a later process of XLA's finds what the
    first one chose."""
    monkeypatch.setattr(host, "usable_cores", lambda: 3)
    met: dict[str, set[str]] = {}
    names = ("xla", "inductor", "inductor-max", "triton")
    crew = WatchedCrew([], met, autotune_lock.lock_of(tmp_path))
    records = run(
        tmp_path, crew, *names, blocks=("linear", "linear_residual"), case="llama-8b-out",
        timing=Timing(restarts=restarts),
    )
    assert len(records) == 16 and {r.status for r in records.values()} == {"ok"}
    for name in names:
        assert met[f"measure {name}"] == set(), name
    assert {"tune inductor", "tune triton"}.isdisjoint(met)
    assert crew.calls["prepare", "xla"] == 2 * (2 + restarts)
    assert "produce " in met["prepare inductor"] | met["prepare triton"]


def test_what_dies_while_it_is_timed_tunes_again_in_the_turn_that_was_its_lanes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    crew = WatchedCrew([], {}, autotune_lock.lock_of(tmp_path))
    crew.faults = {("measure", "triton"): (2, WorkerDied("the torch worker died (signal SIGSEGV)"))}
    names = ("inductor-max", "triton")
    records = run(tmp_path, crew, *names, blocks=("linear",), case="llama-8b-out", directions=("fwd",))
    assert {r.implementation: r.status for r in records.values()} == {"inductor-max": "ok", "triton": "failed"}
    assert crew.calls["prepare", "inductor-max"] == 1 + 2  # left, tuned, and after the death


def test_a_compile_that_hangs_is_given_up_sooner_than_one_that_tunes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until it is, nobody is timed."""
    patience: dict[str, set[float]] = {}
    answer = ScriptedCrew.ask

    def note(crew: ScriptedCrew, role: str, method: str, *, timeout: float = 0, **params: Any) -> Any:
        if method == "prepare":
            patience.setdefault("tunes" if params["tune"] else "compiles", set()).add(timeout)
        return answer(crew, role, method, timeout=timeout, **params)

    monkeypatch.setattr(ScriptedCrew, "ask", note)
    run(tmp_path, ScriptedCrew({}), "inductor", "inductor-max", blocks=("linear",), case="llama-8b-out")
    assert patience == {"compiles": {600}, "tunes": {900}}


def test_who_is_ready_is_timed_while_others_compile(
    tmp_path: Path, lanes: ScriptedCrew, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two lanes: swiglu, which begins first, takes long in one of them."""
    monkeypatch.setattr(on_gpu, "READY_SHARE", 0.5)
    answer = ScriptedCrew.ask

    def slowly(crew: ScriptedCrew, role: str, method: str, **params: Any) -> Any:
        if method == "prepare" and params["id"].startswith("swiglu"):
            time.sleep(0.2)
        return answer(crew, role, method, **params)

    monkeypatch.setattr(ScriptedCrew, "ask", slowly)
    records = run(tmp_path, lanes, "eager", "triton", blocks=THREE)
    assert len(records) == 12 and {r.status for r in records.values()} == {"ok"}
    ids = [json.loads(line)["id"] for line in (tmp_path / "records.jsonl").read_text().splitlines()]
    assert [name.split("/")[0] for name in ids] == ["rmsnorm"] * 4 + ["gelu"] * 4 + ["swiglu"] * 4


@pytest.mark.parametrize("faults", [{}, {("check", "triton"): (1, WorkerError("wrong", "it changed its inputs"))}])
def test_artifacts_are_packed_once_they_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, faults: Any
) -> None:
    """Which they are when a check answers, whatever it answers; they are of the first process."""
    crew, packed = ScriptedCrew(faults), []
    monkeypatch.setattr(Session, "archive", lambda self, entry: packed.append((entry.implementation, dict(crew.calls))))
    run(tmp_path, crew, "triton", timing=Timing(restarts=1))
    ((name, calls),) = packed
    assert name == "triton" and calls["check", "triton"] == 1


@pytest.mark.parametrize(("own", "cores", "found"), [(None, 16, "4"), (None, 2, "2"), ("8", 16, "8")])
def test_inductor_compiles_in_few_processes_unless_the_user_says_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: str | None, cores: int, found: str
) -> None:
    monkeypatch.setattr(host, "usable_cores", lambda: cores)
    monkeypatch.delenv(on_gpu.INDUCTORS, raising=False)
    if own:
        monkeypatch.setenv(on_gpu.INDUCTORS, own)
    assert on_gpu.environment(tmp_path)[on_gpu.INDUCTORS] == found


def test_what_cannot_be_packed_ends_the_run_and_leaves_no_record_without_it(
    tmp_path: Path, lanes: ScriptedCrew, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(session: Session, entry: Record) -> None:
        raise RunFolderError("no space left")

    monkeypatch.setattr(Session, "archive", full)
    with pytest.raises(RunFolderError, match="no space"):
        run(tmp_path, lanes, "xla", "triton", blocks=THREE)
    assert record.read_records(tmp_path)[0] == []


def test_what_is_interrupted_packs_nothing_more_and_keeps_what_was_timed(
    tmp_path: Path, lanes: ScriptedCrew, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on_gpu, "READY_SHARE", 0.1)
    packed: list[str] = []

    def pack(session: Session, entry: Record) -> None:
        time.sleep(0.05)
        packed.append(entry.id)

    def interrupt(rota: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Session, "archive", pack)
    monkeypatch.setattr(Clerk, "answer", interrupt)  # after the first have been timed
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, lanes, "eager", "triton", blocks=THREE)
    written = [json.loads(line)["id"] for line in (tmp_path / "records.jsonl").read_text().splitlines()]
    assert written and {*written} <= {*packed} and len(packed) < 12


def test_a_run_begins_with_what_xla_chose_elsewhere(tmp_path: Path) -> None:
    """Of a target or another run, where no process's own file that is not joined yet."""
    before = tmp_path / "before" / "target" / "xla"
    before.mkdir(parents=True)
    (before / "autotune-0.11.2.textproto").write_text("chosen")
    (before / "autotune-0.11.2.4711.textproto").write_text("of a process that was killed")
    on_gpu.take_choices(tmp_path / "run", recorded_choices(str(tmp_path / "before")))
    (taken,) = (tmp_path / "run" / "target" / "xla").iterdir()
    assert (taken.name, taken.read_text()) == ("autotune-0.11.2.textproto", "chosen")
    assert [path.name for path in recorded_choices("h200")] == ["autotune-0.11.2.textproto"]
    (before / "autotune-0.11.2.textproto").unlink()
    with pytest.raises(UsageError, match="holds no choices of XLA"):
        recorded_choices(str(tmp_path / "before"))
    pack = tmp_path / "run" / "target" / "xla"
    assert on_gpu._of_other_versions(pack, "0.11.2") is None
    problem = on_gpu._of_other_versions(pack, "0.10.2")
    assert problem == "XLA's recorded choices are of jax 0.11.2, and this is 0.10.2: it tunes all anew"
    (pack / "autotune-0.11.2.textproto").rename(pack / "autotune-0.10.2.4711.textproto")  # which cannot be joined
    assert on_gpu._of_other_versions(pack, "0.10.2") is None


PRIMES = ["gelu/prime/fp32", "rmsnorm/prime/fp32", "swiglu/prime/fp32"]


@pytest.mark.parametrize(
    ("large_share", "order"),
    [
        (9.0, ["swiglu/llama-8b/bf16", *PRIMES, "rmsnorm/llama-8b/bf16", "gelu/llama-8b/bf16"]),
        (0.3, ["swiglu/llama-8b/bf16", "rmsnorm/llama-8b/bf16", "gelu/llama-8b/bf16", *PRIMES]),
    ],
)
def test_groups_wait_for_the_memory_that_they_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, large_share: float, order: list[str]
) -> None:
    """There are cores for ten lanes, and memory for three; but of the large groups for one at a time."""
    monkeypatch.setattr(host, "usable_cores", lambda: 16)
    monkeypatch.setattr(room, "COPIES", 150)
    monkeypatch.setattr(room, "LARGE_SHARE", large_share)
    monkeypatch.setattr(on_gpu, "READY_SHARE", 1.0)
    crew = ScriptedCrew({})
    crew.memory_bytes = 43 << 30
    plan = resolve(("gelu", "swiglu", "rmsnorm"), suite="quick", implementations=["xla"], directions=["fwd"])
    record.create(tmp_path, {"segments": []})
    on_gpu.environment(tmp_path)
    session = Session(tmp_path, tmp_path / "scratch", crew, Silent(), {}, None)  # type: ignore[arg-type]
    on_gpu.run(plan, session)
    assert len(crew.siblings) == 2
    records = record.read_records(tmp_path)[0]
    assert len(records) == 6 and {r.status for r in records} == {"ok"}
    ids = [json.loads(line)["id"] for line in (tmp_path / "records.jsonl").read_text().splitlines()]
    assert [name.rpartition("/fwd")[0] for name in ids] == order


def test_what_has_most_to_compile_comes_first_and_what_tunes_is_spread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With memory for all, in one lane. Of these, vector_add/64Mi tunes."""
    monkeypatch.setattr(host, "usable_cores", lambda: 2)
    crew = ScriptedCrew({})
    crew.memory_bytes = 140 << 30
    plan = resolve(("vector_add", "rmsnorm"), suite="quick", cases=["64Mi", "prime"])
    record.create(tmp_path, {"segments": []})
    on_gpu.environment(tmp_path)
    session = Session(tmp_path, tmp_path / "scratch", crew, Silent(), {}, None)  # type: ignore[arg-type]
    on_gpu.run(plan, session)
    ids = [json.loads(line)["id"] for line in (tmp_path / "records.jsonl").read_text().splitlines()]
    shapes = list(dict.fromkeys("/".join(name.split("/")[:2]) for name in ids))
    assert shapes == ["rmsnorm/prime", "vector_add/64Mi", "vector_add/prime"]


def test_records_are_read_in_the_order_of_the_plan(tmp_path: Path, lanes: ScriptedCrew) -> None:
    """Which is not the order in which a run does them."""
    records = run(tmp_path, lanes, "xla", "triton", blocks=THREE)
    written = [json.loads(line)["id"] for line in (tmp_path / "records.jsonl").read_text().splitlines()]
    plan = resolve(THREE, suite="quick", cases=["prime"], implementations=["xla", "triton"])
    record.create(tmp_path, {"segments": [], "plan": plan.to_json()})
    planned = [f"{case.id}/{i.name}" for case, found in plan.work for i in found]
    assert [r.id for r in record.read_records(tmp_path)[0]] == planned != written == list(records)
    (tmp_path / "run.json").write_text('{"plan": {"work": [7]}}')
    assert [r.id for r in record.read_records(tmp_path)[0]] == written


def test_a_case_gone_on_with_is_done_whole(tmp_path: Path) -> None:
    """Also what was not named, if it has a record: that one's segment is over."""
    plan = resolve(("vector_add", "gelu"), suite="quick", cases=["prime"], directions=["fwd"], implementations=["xla"])
    vector_add, gelu = (case.id for case, _ in plan.work)
    done = {f"{vector_add}/triton", f"{vector_add}/eager", f"{gelu}/xla", f"{gelu}/triton"}
    found = {case.id: [i.name for i in each] for case, each in run_module.with_whole_cases(plan, done).work}
    assert found == {vector_add: ["xla", "eager", "triton"], gelu: ["xla"]}


def test_what_was_measured_and_cannot_be_run_any_more_keeps_its_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run gone on with where an optional package is not installed: its case is measured again whole, but for that."""

    def execute(crew: ScriptedCrew, *implementations: str, resume: bool) -> dict[str, Record]:
        monkeypatch.setattr(run_module, "Crew", lambda logs, environment: crew)
        plan = resolve(["vector_add"], suite="quick", cases=["prime"], implementations=implementations)
        assert run_module.execute(plan, folder=folder, target=None, resume=resume) == 0
        return {r.implementation: r for r in record.read_records(folder)[0]}

    monkeypatch.setattr(run_module.machine, "gpu_present", lambda: True)
    monkeypatch.setattr(ScriptedCrew, "stop", lambda crew: None, raising=False)
    folder = tmp_path / "run"
    lacking = WorkerError("skipped", "liger-kernel is not installed")
    before = execute(ScriptedCrew({("prepare", "cuda"): (1, lacking)}), "triton", "library", "cuda", resume=False)
    assert [before[name].status for name in ("triton", "library", "cuda")] == ["ok", "ok", "skipped"]
    capsys.readouterr()
    without = ScriptedCrew({("prepare", name): (1, lacking) for name in ("library", "cuda")})
    after = execute(without, "xla", resume=True)
    assert {name: (r.status, r.segment) for name, r in after.items()} == {
        "xla": ("ok", "s2"), "triton": ("ok", "s2"), "library": ("ok", "s1"), "cuda": ("skipped", "s2"),
    }
    assert after["library"] == before["library"]
    id = after["library"].id
    assert f"kept     {id}  as of segment s1; now: liger-kernel is not installed" in capsys.readouterr().err


def test_what_was_done_of_other_sizes_is_done_again(tmp_path: Path) -> None:
    """An id says no sizes, and a suite's may change between two versions."""
    plan = resolve(["vector_add"], suite="quick", cases=["prime"], implementations=["xla", "triton"])
    (case, _), *_ = plan.work
    folder = tmp_path / "run"
    record.create(folder, {"target": "h200", "segments": []})
    older = replace(case, sizes={name: size + 1 for name, size in case.sizes.items()})
    for made in (Record(older, "xla", "xla", "compiled"), Record(case, "triton", "triton", "compiled")):
        record.append(folder, made)
    assert list(run_module._open(plan, folder, "h200", resume=True)) == [f"{case.id}/triton"]
