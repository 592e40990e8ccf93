"""The run on a GPU, with workers that answer from a script: a fault costs its own record."""

from __future__ import annotations

import json
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from threading import main_thread
from typing import Any

import pytest
from made_records import made_record
from pretended_gpus import GPUS, gpu, pretend

from xlafuse.compare.base import host
from xlafuse.compare.graph import store
from xlafuse.compare.graph.model import Access, Buffer, FusionGraph, Kernel
from xlafuse.compare.measure import timeline
from xlafuse.compare.plan.plan import Plan
from xlafuse.compare.plan.selection import resolve
from xlafuse.compare.plan.speedup import LEAST_ROUNDS
from xlafuse.compare.plan.timing_modes import Timing
from xlafuse.compare.record import run_folder
from xlafuse.compare.record.record import Record
from xlafuse.compare.record.record_fields import KernelsOfPhase, PeakMemory, TimedMode, WarmUp
from xlafuse.compare.record.run_folder import RunFolderError
from xlafuse.compare.run import case_runner, on_gpu, progress
from xlafuse.compare.run import run as run_module
from xlafuse.compare.run.session import Session
from xlafuse.compare.sources.run_source import open_run
from xlafuse.compare.spec.case import PHASES
from xlafuse.compare.targets import Pack
from xlafuse.compare.workers.client import WorkerDied, WorkerError, WorkerTimeout

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


class ScriptedPool:
    """Answers as workers would; `faults` maps (method, implementation) to (which call or calls, exception).

    before: called at the start of each request with pool, role, method and parameters.
    """

    before: Callable[[ScriptedPool, str, str, dict[str, Any]], None] | None = None

    def __init__(self, faults: dict[tuple[str, str], tuple[int | range, Exception]]) -> None:
        self.faults, self.calls = faults, Counter[tuple[str, str]]()
        self.errors: dict[str, float] = {}
        self.programs: dict[str, set[str]] = {}  # by role: what its process holds

        self.siblings: list[ScriptedPool] = []
        self.faults_of_siblings: dict[tuple[str, str], tuple[int | range, Exception]] = {}
        self.scales: list[Any] = []  # of the references, as checks were told
        self.timer, self.jax = "cupti", "0.11.2"
        self.times = TIMES
        self.free_bytes = 0  # of the GPU: unknown, so one runner
        self.keeping: set[str] = set()  # roles whose processes keep too much of the GPU's memory
        self.may_keep = -1  # bytes, as it was last asked
        self.chosen: set[str] = set()  # roles whose choices of kernels are known to a later process
        self.measured: list[tuple[str, int]] = []  # what, on which input set, in order
        self.restarted: list[int] = []  # after how many of those

    def start(self, roles: set[str]) -> None: ...

    def restart(self, roles: set[str] | None = None) -> None:
        self.restarted.append(len(self.measured))
        self.chosen.add("xla")
        for role in self.programs if roles is None else roles:
            self.programs.setdefault(role, set()).clear()
            self.keeping.discard(role)

    def running(self) -> list[str]:
        return list(self.programs)

    def sibling(self) -> ScriptedPool:
        self.siblings.append(ScriptedPool(self.faults_of_siblings))
        return self.siblings[-1]

    def ask(self, role: str, method: str, *, timeout: float = 0, **params: Any) -> Any:
        if self.before:
            self.before(role, method, params | {"timeout": timeout})
        *_, direction, name = f"fwd/{params.get('id', '')}".split("/")
        parts = PHASES.get(direction, ())
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
            if not params["autotune"] and (name == "inductor-max" or (role == "xla" and role not in self.chosen)):
                raise WorkerError("not_autotuned", "kernels would have to be timed")
            held.add(name)
            return {"compile_s": 0.5, "graph": GRAPH, "command_buffers": None, "cuda_graph": None}
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
                first = {"peak_memory": peak}
            self.measured.append((name, params["input_set"]))
            name = "k of a later compile" if self.restarted else "k"
            times = self.times
            if self.timer == "cupti":
                times = times | {"records": [{"name": name, "start": 0.0, "end": 1e-6}]}
            return {"phases": dict.fromkeys(parts, times), "warm_up": WARM_UP, "wall_time": 2e-6, "calls": 3} | first
        if method == "measure_mode":
            self.measured.append((f"{name} {params['mode']}", params["input_set"]))
            if params["mode"] == "no-graph":
                return {"same_as": "cold"}
            return {"phases": dict.fromkeys(parts, self.times), "warm_up": WARM_UP, "command_buffers": None}
        answers: dict[str, Any] = {
            "environment": {
                "timer": self.timer, "device": "GPU", "free_bytes": self.free_bytes, "jax": self.jax,
            },
            "ceilings": {"streams": {}, "products": {}},
            "calibrate": 1e-3,
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
    folder: Path, pool: ScriptedPool, *implementations: str, timing: Timing | None = None,
    blocks: tuple[str, ...] = ("vector_add",), case: str = "", directions: tuple[str, ...] = (),
    said: Silent | None = None, suite: str = "quick", stop_after: float | None = None, plan: Plan | None = None,
) -> dict[str, Record]:
    case = case or ("64Mi" if blocks == ("vector_add",) else "llama-8b")
    if plan is None:
        plan = resolve(
            blocks, suite=suite, cases=[case], dtypes=["bf16"], implementations=implementations, directions=directions
        )
        plan = replace(plan, timing=timing or Timing())
    run_folder.create(folder, {"segments": []})
    on_gpu.environment(folder)
    session = Session(folder, folder / "scratch", pool, said or Silent(), {}, None)  # type: ignore[arg-type]
    on_gpu.run(plan, session, stop_after)
    found = run_folder.read_records(folder)[0]
    one_case = len({r.case.id for r in found}) == 1
    return {r.implementation if one_case else r.id: r for r in found}


def test_all_is_well(tmp_path: Path) -> None:
    records = run(tmp_path, ScriptedPool({}), "xla", "eager", "triton")
    assert {r.status for r in records.values()} == {"ok"} and len(records) == 3
    measured = records["triton"].measurement
    assert measured and measured.phases and len(measured.phases["forward"].device_time) == LEAST_ROUNDS
    assert measured.peak_memory == {"forward": PeakMemory(7, 8)} and measured.timer == "cupti"
    assert records["xla"].kernels["forward"] == KernelsOfPhase(1, 12, {"": 1})
    graph = store.load(tmp_path / str(records["xla"].graph))
    assert graph.kernels and graph.kernels[0].device_time_us == pytest.approx(1.0)
    segment = json.loads((tmp_path / "run.json").read_text())["segments"][0]
    assert segment["id"] == records["xla"].segment and segment["ceilings"] == {"streams": {}, "products": {}}


@pytest.mark.parametrize("name", GPUS)
def test_a_run_leaves_the_properties_and_ceilings_of_any_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    pretend(monkeypatch, GPUS[name])
    pool = ScriptedPool({})
    run(tmp_path, pool, "xla")  # PyTorch's worker is there for the ceilings alone
    assert pool.calls["ceilings", ""] == 1
    pack = Pack(tmp_path / "target")
    assert pack.device_properties() == GPUS[name].properties and pack.ceilings() == {"streams": {}, "products": {}}


@pytest.mark.parametrize(("free_gb", "runners"), [(140, 3), (24, 3), (16, 2), (12, 1), (6, 1)])
def test_a_small_gpu_has_fewer_runners(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free_gb: int, runners: int
) -> None:
    monkeypatch.setattr(host, "usable_cores", lambda: 16)
    pool = ScriptedPool({})
    pool.free_bytes = free_gb << 30
    run(tmp_path, pool, "xla", blocks=THREE)
    assert 1 + len(pool.siblings) == runners


def test_a_kernel_that_the_gpu_has_no_instruction_for_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = WorkerError("failed", "CompilationError: at 1:0\ntype fp8e4nv not supported in this architecture")
    pool = ScriptedPool({("prepare", "triton"): (range(1, 9), refused)})
    pretend(monkeypatch, GPUS["a100-40gb"])
    found = run(tmp_path / "a100", pool, "eager", "triton")
    assert found["eager"].status == "ok" and found["triton"].status == "skipped"
    assert GPUS["a100-40gb"].name in str(found["triton"].detail) and "fp8e4nv" in str(found["triton"].detail)
    pretend(monkeypatch, gpu("h100"))
    pool = ScriptedPool({("prepare", "triton"): (range(1, 9), refused)})
    assert run(tmp_path / "h100", pool, "triton")["triton"].status == "failed"


def test_other_programs_on_the_gpu_warn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, replace(GPUS["l4"], processes=2), GPUS["sm_86"])
    said = Silent()
    run(tmp_path, ScriptedPool({}), "xla", said=said)
    assert len(said.warnings) == 2 and "2 other processes" in said.warnings[0]
    assert GPUS["sm_86"].visible_as in said.warnings[1]


def test_without_cupti_a_record_says_nothing_of_single_kernels(tmp_path: Path) -> None:
    pool = ScriptedPool({})
    pool.timer, pool.times = "cuda-events", TIMES | {"busy_time": None, "launches": None, "records": None}
    eager = run(tmp_path, pool, "eager", timing=Timing(("warm",)))["eager"]
    assert eager.status == "ok" and eager.trace is None and eager.measurement
    for phases in (eager.measurement.phases, eager.measurement.modes["warm"].phases):
        assert phases and len(phases["forward"].device_time) == LEAST_ROUNDS
        assert (phases["forward"].busy_time, phases["forward"].launches) == (None, None)
    assert eager.times["forward"].records is None
    (row,) = (result.row for result in open_run(tmp_path).results)
    assert (row.kernels, row.kernel_source, row.launch_gap) == (1, "compiler", None)


@pytest.mark.parametrize(
    ("method", "fault", "warning"),
    [
        ("ceilings", WorkerError("failed", "no memory\nfor streams"), "this GPU's ceilings could not be measured: "),
        ("calibrate", WorkerDied("SIGSEGV"), "the torch worker's clock could not be calibrated: no ratio"),
    ],
)
def test_an_unknown_property_of_the_gpu_costs_what_depends_on_it_and_warns(
    tmp_path: Path, method: str, fault: Exception, warning: str
) -> None:
    said = Silent()
    records = run(tmp_path, ScriptedPool({(method, ""): (1, fault)}), "xla", "triton", said=said)
    assert {r.status for r in records.values()} == {"ok"}
    assert len(said.warnings) == 1 and said.warnings[0].startswith(warning) and str(fault) in said.warnings[0]
    (segment,) = json.loads((tmp_path / "run.json").read_text())["segments"]
    assert segment["environment"]["workers"]["torch"]["timer"] == "cupti"
    assert (segment["ceilings"] is None) == (method == "ceilings")
    triton = records["triton"]
    assert triton.trace and triton.measurement and triton.measurement.timer == "cupti"
    assert triton.kernels["forward"].unjoined == []
    left = {path.name for path in (tmp_path / "target").glob("*.json")}
    assert left == (set() if method == "ceilings" else {"ceilings.json"})
    source = open_run(tmp_path)
    assert [w.partition("run.json: ")[2] for w in source.warnings] == (
        ["segment s1: the clock of the worker torch could not be calibrated: no ratio between workers is given"]
        if method == "calibrate" else []
    )
    result = next(result for result in source.results if result.name == "triton")
    assert (result.row.time_vs_xla is None) == (method == "calibrate")  # clocks that were not seen to agree
    assert segment.get("uncalibrated") == (["torch"] if method == "calibrate" else None)


def test_clocks_that_differ_warn_in_the_run_and_in_its_reports(tmp_path: Path) -> None:
    class Apart(ScriptedPool):
        def ask(self, role: str, method: str, *, timeout: float = 0, **params: Any) -> Any:
            answer = super().ask(role, method, timeout=timeout, **params)
            return answer * 1.03 if method == "calibrate" and role == "xla" else answer

    said = Silent()
    run(tmp_path, Apart({}), "xla", "triton", said=said)
    assert said.warnings == ["the workers' clocks differ by 3.0%: no ratio between them will be given"]
    source = open_run(tmp_path)
    assert [result.row.time_vs_xla for result in source.results if result.name == "triton"] == [None]
    assert source.warnings == (
        f"{tmp_path / 'run.json'}: segment s1: the workers' clocks differ by 3.0%: no ratio between workers is given",
    )


def test_autotune_results_of_another_jax_warn(tmp_path: Path) -> None:
    (tmp_path / "target" / "xla").mkdir(parents=True)
    (tmp_path / "target" / "xla" / "autotune-0.11.2.textproto").write_text("")
    pool, said = ScriptedPool({}), Silent()
    pool.jax = "0.10.2"
    run(tmp_path, pool, "xla", said=said)
    assert len(said.warnings) == 1 and "0.11.2" in said.warnings[0] and "0.10.2" in said.warnings[0]


def test_a_worker_that_cannot_start_warns(tmp_path: Path) -> None:
    said = Silent()
    fault = WorkerError("failed", "ModuleNotFoundError: torch")
    run(tmp_path, ScriptedPool({("environment", ""): (1, fault)}), "xla", "triton", said=said)  # torch's comes first
    assert said.warnings == ["the torch worker is not available: ModuleNotFoundError: torch"]
    (segment,) = json.loads((tmp_path / "run.json").read_text())["segments"]
    assert segment["environment"]["workers"]["torch"] == {"unavailable": "ModuleNotFoundError: torch"}


def test_a_warning_is_a_line_on_a_terminal_and_without_one(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for terminal in (False, True):
        monkeypatch.setattr(progress.sys.stderr, "isatty", lambda terminal=terminal: terminal)
        with progress.Progress({"gelu": 1}) as shown:
            shown.warn("clocks [differ]:\nno ratio")
            shown.say("timing")
        assert "clocks [differ]: no ratio\n" in capfd.readouterr().err


def test_every_input_set_has_the_tolerance_of_the_worst_one(tmp_path: Path) -> None:
    pool = ScriptedPool({})
    run(tmp_path, pool, "xla", "triton")
    assert pool.scales == [[{"out": {"rms": 1.0, "largest": 2.0, "independent_error": 0.5}}] * 2] * 2


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
        ("measure_mode", WorkerError("wrong", "timed call: out: error inf"), "wrong", "timed call"),
    ],
)
def test_a_fault_costs_its_own_record(
    tmp_path: Path, method: str, fault: Exception, status: str, reason: str
) -> None:
    timing = Timing(("warm",)) if method == "measure_mode" else None
    records = run(tmp_path, ScriptedPool({(method, "triton"): (1, fault)}), "xla", "eager", "triton", timing=timing)
    bad = records.pop("triton")
    assert bad.status == status and bad.detail and reason in bad.detail and bad.measurement is None
    assert {r.status for r in records.values()} == {"ok"} and len(records) == 2
    assert all(r.measurement for r in records.values())


def test_after_a_death_the_others_go_on_with_the_rounds_they_have(tmp_path: Path) -> None:
    pool = ScriptedPool({("measure", "triton"): (3, WorkerDied("the torch worker died (signal SIGKILL)"))})
    records = run(tmp_path, pool, "xla", "eager", "triton")
    assert records["triton"].status == "failed"
    eager = records["eager"].measurement
    assert eager and len(records["eager"].times["forward"].device_time) == LEAST_ROUNDS
    assert pool.calls["prepare", "eager"] == 2  # again in the fresh process
    assert pool.calls["prepare", "xla"] == 2  # refused, then autotuned: another process, untouched


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
    pool = ScriptedPool(faults)
    records = run(
        tmp_path, pool, *names, timing=Timing(restarts=1), blocks=("matmul",), case="llama-8b-up", directions=("fwd",)
    )
    assert {name: r.status for name, r in records.items()} == {
        name: "failed" if name in failed else "ok" for name in names
    }
    assert {r.detail for r in records.values() if r.status == "failed"} == {str(LOST)}


def test_a_worker_that_refuses_to_autotune_has_failed(tmp_path: Path) -> None:
    pool = ScriptedPool({("prepare", "xla"): (2, WorkerError("not_autotuned", "not even now"))})
    records = run(tmp_path, pool, "xla", "eager")
    assert records["xla"].status == "failed" and "not even now" in str(records["xla"].detail)
    assert records["eager"].status == "ok"


def test_a_wrong_implementation_is_not_timed(tmp_path: Path) -> None:
    pool = ScriptedPool({})
    pool.errors["triton"] = 0.3
    records = run(tmp_path, pool, "eager", "triton")
    assert records["triton"].status == "wrong" and "0.3" in str(records["triton"].detail)
    assert pool.calls["measure", "triton"] == 0 and pool.calls["measure", "eager"] == LEAST_ROUNDS


def test_without_a_reference_every_record_says_so(tmp_path: Path) -> None:
    pool = ScriptedPool({("produce", ""): (1, WorkerError("skipped", "torch is not installed"))})
    records = run(tmp_path, pool, "xla", "eager")
    assert {r.status for r in records.values()} == {"skipped"}
    assert all("no reference: torch is not installed" in str(r.detail) for r in records.values())


def test_each_record_names_its_timeline(tmp_path: Path) -> None:
    for found in run(tmp_path, ScriptedPool({}), "xla", "triton").values():
        assert found.trace and found.trace.file
        document = timeline.load(tmp_path / found.trace.file)
        assert document["otherData"]["records"] == [found.id]
        (kernel,) = [event for event in document["traceEvents"] if event.get("cat") == "kernel"]
        assert kernel["args"]["bytes_read"] == 8 and kernel["ts"] == 1  # the graph's; a microsecond after the launch


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (WorkerError("failed", "RuntimeError: CUPTI_ERROR_UNKNOWN"), "RuntimeError: CUPTI_ERROR_UNKNOWN"),
        (WorkerDied("the torch worker died (signal SIGSEGV)"), "/eager was traced: the torch worker died"),
    ],
)
def test_a_timeline_that_fails_costs_no_time(tmp_path: Path, fault: Exception, reason: str) -> None:
    pool = ScriptedPool({("trace", "eager"): (1, fault)})
    records = run(tmp_path, pool, "xla", "eager", "triton")
    assert {r.status for r in records.values()} == {"ok"} and all(r.measurement for r in records.values())
    eager, triton, xla = (records[name].trace for name in ("eager", "triton", "xla"))
    assert eager and triton and xla
    assert reason in str(eager.unavailable) and xla.file
    assert (triton.file is None) == isinstance(fault, WorkerDied)  # its program died with the worker


def test_a_graph_or_timeline_that_does_not_fit_costs_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **options: Any) -> Any:
        raise ValueError("kernels of another program")

    monkeypatch.setattr(case_runner, "join", refuse)
    monkeypatch.setattr(timeline, "of_call", refuse)
    said = Silent()
    record = run(tmp_path, ScriptedPool({}), "triton", said=said)["triton"]
    assert record.status == "ok" and record.measurement is not None and record.graph is None
    assert record.trace is not None and record.trace.unavailable == "ValueError: kernels of another program"
    assert said.warnings == [f"{record.id} has no graph: ValueError: kernels of another program"]


def test_a_full_run_times_only_main_cases_in_every_mode_and_traces_them(tmp_path: Path) -> None:
    plan = resolve(["gelu"], suite="full", implementations=["xla", "triton"], directions=["fwd"])
    plan = replace(plan, timing=replace(plan.timing, restarts=0))
    records = run(tmp_path, ScriptedPool({}), plan=plan)
    main = {r.case.id for r in records.values() if r.measurement and r.measurement.modes}
    assert main == {r.case.id for r in records.values() if r.trace} == {plan.work[0][0].id}
    assert len({r.case.id for r in records.values()}) == 3 and all(r.measurement for r in records.values())


def test_each_round_visits_every_mode_on_another_input_set(tmp_path: Path) -> None:
    pool = ScriptedPool({})
    records = run(tmp_path, pool, "xla", "triton", timing=Timing(("warm", "graph", "no-graph")))
    assert pool.measured[:8] == [
        ("xla", 0), ("triton", 0), ("xla warm", 0), ("triton warm", 0), ("xla graph", 0), ("triton graph", 0),
        ("xla no-graph", 0), ("triton no-graph", 0),
    ]
    assert pool.measured[8:12] == [("triton", 1), ("xla", 1), ("triton warm", 1), ("xla warm", 1)]
    assert pool.calls["measure_mode", "triton"] == 2 * LEAST_ROUNDS + 1  # what is the main mode again is asked for once
    measured = records["triton"].measurement
    assert measured and set(measured.modes) == {"warm", "graph", "no-graph"}
    assert len((measured.modes["graph"].phases or {})["forward"].device_time) == LEAST_ROUNDS
    assert measured.modes["no-graph"] == TimedMode(same_as="cold")
    assert measured.warm_up == WarmUp([0.01] * LEAST_ROUNDS, [True] * LEAST_ROUNDS)
    assert measured.processes == [0] * LEAST_ROUNDS and measured.command_buffers is None


@pytest.mark.parametrize(
    "fault",
    [WorkerError("failed", "CaptureFailed: no CUDA graph"), WorkerDied("CaptureFailed: no CUDA graph; after it ...")],
)
def test_a_mode_that_cannot_be_had_costs_itself(tmp_path: Path, fault: Exception) -> None:
    pool = ScriptedPool({("measure_mode", "triton"): (2, fault)})  # the first round's second mode
    records = run(tmp_path, pool, "xla", "eager", "triton", timing=Timing(("warm", "graph")))
    assert {r.status for r in records.values()} == {"ok"}
    measured = records["triton"].measurement
    assert measured and "no CUDA graph" in str(measured.modes["graph"].unavailable)
    assert len((measured.modes["warm"].phases or {})["forward"].device_time) == LEAST_ROUNDS
    assert len(records["triton"].times["forward"].device_time) == LEAST_ROUNDS
    assert pool.calls["measure_mode", "triton"] == LEAST_ROUNDS + 1  # asked for once
    died = isinstance(fault, WorkerDied)
    assert pool.calls["prepare", "eager"] == pool.calls["prepare", "triton"] == (2 if died else 1)


def test_fresh_workers_take_their_share_of_the_rounds(tmp_path: Path) -> None:
    pool = ScriptedPool({})
    records = run(tmp_path, pool, "xla", "triton", timing=Timing(restarts=2))
    assert pool.restarted == [4, 8]  # two rounds of two implementations each
    assert pool.calls["prepare", "triton"] == 3 and pool.calls["check", "triton"] == 1
    for entry in records.values():
        assert entry.status == "ok" and entry.measurement and entry.measurement.processes == [0, 0, 1, 1, 2, 2]
        assert (entry.times["forward"].records or [])[0].name == "k"  # of the compile that is described
        assert entry.kernels["forward"].unjoined == []


def test_an_implementation_that_cannot_be_prepared_again_costs_itself(tmp_path: Path) -> None:
    pool = ScriptedPool({("prepare", "triton"): (2, WorkerError("failed", "OutOfMemoryError"))})
    records = run(tmp_path, pool, "xla", "triton", timing=Timing(restarts=1))
    assert records["triton"].status == "failed" and "OutOfMemory" in str(records["triton"].detail)
    assert records["xla"].status == "ok"


THREE = ("gelu", "rmsnorm", "swiglu")  # with two directions each
NO_MEMORY = WorkerError("out_of_memory", "OutOfMemoryError: CUDA out of memory")


@pytest.fixture
def two_runners(monkeypatch: pytest.MonkeyPatch) -> ScriptedPool:
    monkeypatch.setattr(host, "usable_cores", lambda: 3)
    pool = ScriptedPool({})
    pool.free_bytes = 140 << 30
    return pool


def written(folder: Path) -> list[str]:
    """Return the block of each record, in the order in which they were written, each once."""
    ids = [json.loads(line)["id"] for line in (folder / "records.jsonl").read_text().splitlines()]
    return list(dict.fromkeys(id.split("/")[0] for id in ids))


def test_runners_share_the_groups_of_each_batch(tmp_path: Path, two_runners: ScriptedPool) -> None:
    records = run(tmp_path, two_runners, "xla", "triton", blocks=THREE)
    assert len(records) == 12 and {r.status for r in records.values()} == {"ok"}
    (sibling,) = two_runners.siblings
    assert two_runners.calls["produce", ""] == 2 * 2 and sibling.calls["produce", ""] == 2  # two input sets a group
    assert two_runners.calls["check", "triton"] == 4 and sibling.calls["check", "triton"] == 2
    assert sibling.calls["environment", ""] == sibling.calls["ceilings", ""] == 0
    segment = json.loads((tmp_path / "run.json").read_text())["segments"][0]
    assert segment["runners"] == 2 and set(segment["clocks"]) == {"torch", "xla", "torch 2", "xla 2"}
    assert written(tmp_path)[2] == "gelu"  # its few tensors compile fastest, so it comes in the second batch


def test_an_unknown_gpu_memory_gives_one_runner(tmp_path: Path, two_runners: ScriptedPool) -> None:
    two_runners.free_bytes = 0
    run(tmp_path, two_runners, "xla", blocks=THREE)
    assert two_runners.siblings == []


@pytest.mark.parametrize("method", ["prepare", "check", "measure"])
def test_a_group_without_memory_is_done_again_alone_in_fresh_workers(
    tmp_path: Path, two_runners: ScriptedPool, method: str
) -> None:
    two_runners.faults = {(method, "triton"): (1, NO_MEMORY)}  # the first runner's first group
    records = run(tmp_path, two_runners, "xla", "triton", blocks=THREE)
    assert len(records) == 12 and {r.status for r in records.values()} == {"ok"}
    assert len(written(tmp_path)) == 3 and written(tmp_path)[1] == "gelu"
    assert two_runners.restarted and two_runners.siblings[0].restarted


def test_a_mode_without_memory_is_measured_again_alone(tmp_path: Path, two_runners: ScriptedPool) -> None:
    two_runners.faults = {("measure_mode", "triton"): (1, NO_MEMORY)}
    records = run(tmp_path, two_runners, "xla", "triton", timing=Timing(("warm",)), blocks=THREE)
    assert len(records) == 12 and {r.status for r in records.values()} == {"ok"}
    assert not any(r.measurement.modes["warm"].unavailable for r in records.values() if r.measurement)


def test_a_group_without_memory_even_alone_has_failed(tmp_path: Path, two_runners: ScriptedPool) -> None:
    two_runners.faults = {("measure", "triton"): (range(1, 99), NO_MEMORY)}
    records = run(tmp_path, two_runners, "xla", "triton", blocks=("rmsnorm", "swiglu"))
    failed = [r for r in records.values() if r.status == "failed"]
    assert {r.implementation for r in failed} == {"triton"} and len({r.case.block for r in failed}) == 1
    assert len(records) == 8


def test_a_row_that_the_gpu_is_too_small_for_is_skipped_with_its_estimate(tmp_path: Path) -> None:
    pool = ScriptedPool({("prepare", "triton"): (range(1, 9), NO_MEMORY)})
    pool.free_bytes = 1 << 20  # less than any case's estimate
    found = run(tmp_path, pool, "xla", "triton")
    assert found["xla"].status == "ok" and found["triton"].status == "skipped"
    assert "GB by estimate" in str(found["triton"].detail) and "out of memory" in str(found["triton"].detail)


def test_workers_that_keep_memory_are_restarted_between_batches(
    tmp_path: Path, two_runners: ScriptedPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def keep(pool: ScriptedPool, role: str, method: str, params: Any) -> None:
        if method == "measure" and role == "xla":
            pool.keeping.add(role)

    monkeypatch.setattr(ScriptedPool, "before", keep)
    run(tmp_path, two_runners, "xla", "triton", blocks=THREE)
    assert len(two_runners.restarted) == 2 and two_runners.keeping == set()
    assert two_runners.may_keep == on_gpu.KEPT_BYTES
    alone = ScriptedPool({})
    run(tmp_path / "alone", alone, "xla", "eager")
    assert alone.keeping == {"xla"} and alone.restarted == []


def test_a_death_while_asked_for_kept_memory_costs_nothing(tmp_path: Path, two_runners: ScriptedPool) -> None:
    two_runners.faults = {("needs_restart", ""): (1, WorkerDied("killed"))}
    assert {r.status for r in run(tmp_path, two_runners, "xla", blocks=THREE).values()} == {"ok"}


def test_every_runner_starts_fresh_workers(tmp_path: Path, two_runners: ScriptedPool) -> None:
    records = run(tmp_path, two_runners, "xla", "triton", timing=Timing(restarts=1), blocks=("gelu", "swiglu"))
    assert {tuple(r.measurement.processes) for r in records.values() if r.measurement} == {(0, 0, 0, 1, 1)}
    assert len(two_runners.restarted) == len(two_runners.siblings[0].restarted) == 1


class WatchedPool(ScriptedPool):
    """A pool whose requests take a while and note which others are under way; siblings share the notes."""

    def __init__(self, under_way: list[str], met: dict[str, set[str]]) -> None:
        super().__init__({})
        self.under_way, self.met = under_way, met
        self.free_bytes = 140 << 30

    def sibling(self) -> ScriptedPool:
        self.siblings.append(WatchedPool(self.under_way, self.met))
        return self.siblings[-1]

    def ask(self, role: str, method: str, *, timeout: float = 0, **params: Any) -> Any:
        name = params.get("id", "").rpartition("/")[2]
        request = f"{'autotune' if params.get('autotune') else method} {name}"
        self.met.setdefault(request, set()).update(self.under_way)
        for other in self.under_way:
            self.met[other].add(request)
        self.under_way.append(request)
        time.sleep(0.01)
        try:
            return super().ask(role, method, **params)
        finally:
            self.under_way.remove(request)


@pytest.mark.parametrize("restarts", [0, 1])
def test_nothing_runs_beside_a_measurement_and_only_autotuning_beside_autotuning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restarts: int
) -> None:
    monkeypatch.setattr(host, "usable_cores", lambda: 3)
    met: dict[str, set[str]] = {}
    names = ("xla", "inductor", "inductor-max", "triton")
    pool = WatchedPool([], met)
    records = run(tmp_path, pool, *names, blocks=("gelu", "rmsnorm"), timing=Timing(restarts=restarts))
    assert len(records) == 16 and {r.status for r in records.values()} == {"ok"} and len(pool.siblings) == 1
    for name in names:
        assert met[f"measure {name}"] == set(), name
    assert {"autotune inductor", "autotune triton"}.isdisjoint(met)
    for name in ("xla", "inductor-max"):  # no recorded choice, and max-autotune
        assert met[f"autotune {name}"] <= {"autotune xla", "autotune inductor-max"}
    assert "produce " in met["prepare inductor"] | met["prepare triton"]  # references beside the compiles


def test_a_death_while_timed_autotunes_the_others_again(tmp_path: Path) -> None:
    pool = ScriptedPool({("measure", "triton"): (2, WorkerDied("the torch worker died (signal SIGSEGV)"))})
    names = ("inductor-max", "triton")
    records = run(tmp_path, pool, *names, blocks=("matmul",), case="llama-8b-up", directions=("fwd",))
    assert {r.implementation: r.status for r in records.values()} == {"inductor-max": "ok", "triton": "failed"}
    assert pool.calls["prepare", "inductor-max"] == 1 + 2  # refused, autotuned, and after the death


def test_a_compile_has_less_time_than_autotuning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits: dict[bool, set[float]] = {}

    def note(pool: ScriptedPool, role: str, method: str, params: Any) -> None:
        if method == "prepare":
            limits.setdefault(params["autotune"], set()).add(params["timeout"])

    monkeypatch.setattr(ScriptedPool, "before", note)
    run(tmp_path, ScriptedPool({}), "inductor", "inductor-max", blocks=("matmul",), case="llama-8b-up")
    assert max(limits[False]) < min(limits[True])


@pytest.mark.parametrize("faults", [{}, {("check", "triton"): (1, WorkerError("wrong", "it changed its inputs"))}])
def test_artifacts_are_packed_once_after_the_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, faults: Any
) -> None:
    pool, packed = ScriptedPool(faults), []
    monkeypatch.setattr(Session, "archive", lambda self, entry: packed.append((entry.implementation, dict(pool.calls))))
    run(tmp_path, pool, "triton", timing=Timing(restarts=1))
    ((name, calls),) = packed
    assert name == "triton" and calls["check", "triton"] == 1


def test_a_program_is_not_compiled_again_while_its_artifacts_are_packed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker dies while it checks one program, so it prepares the other, which it has checked, again."""
    packing: list[str] = []
    prepared: list[str] = []

    def pack(session: Session, entry: Record) -> None:
        packing.append(entry.id)
        time.sleep(0.05)
        packing.remove(entry.id)

    def watch(pool: ScriptedPool, role: str, method: str, params: Any) -> None:
        if method == "prepare":
            prepared.append(params["id"])
            assert params["id"] not in packing

    monkeypatch.setattr(Session, "archive", pack)
    monkeypatch.setattr(ScriptedPool, "before", watch)
    records = run(tmp_path, ScriptedPool({("check", "triton"): (1, LOST)}), "eager", "triton")
    assert {name: r.status for name, r in records.items()} == {"eager": "ok", "triton": "failed"}
    assert len(prepared) > len({*prepared})


@pytest.mark.parametrize(("own", "cores", "found"), [(None, 16, "4"), (None, 2, "2"), ("8", 16, "8")])
def test_inductor_compiles_in_few_processes_unless_the_user_says_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: str | None, cores: int, found: str
) -> None:
    monkeypatch.setattr(host, "usable_cores", lambda: cores)
    monkeypatch.delenv(on_gpu.INDUCTOR_THREADS, raising=False)
    if own:
        monkeypatch.setenv(on_gpu.INDUCTOR_THREADS, own)
    assert on_gpu.environment(tmp_path)[on_gpu.INDUCTOR_THREADS] == found


def test_an_archive_that_cannot_be_written_ends_the_run(
    tmp_path: Path, two_runners: ScriptedPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(session: Session, entry: Record) -> None:
        raise RunFolderError("no space left")

    monkeypatch.setattr(Session, "archive", full)
    with pytest.raises(RunFolderError, match="no space"):
        run(tmp_path, two_runners, "xla", "triton", blocks=THREE)
    assert run_folder.read_records(tmp_path)[0] == []


def test_a_run_stops_after_its_time_and_keeps_finished_cases_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second of three groups is prepared when the time is up."""
    now = [0.0]
    monkeypatch.setattr(on_gpu.time, "monotonic", lambda: now[0])

    def slowly(pool: ScriptedPool, role: str, method: str, params: Any) -> None:
        if method == "measure":
            now[0] += 1.0

    monkeypatch.setattr(ScriptedPool, "before", slowly)
    first = 2 * 2 * LEAST_ROUNDS  # two implementations in two directions
    with pytest.raises(on_gpu.TimeIsUp):
        run(tmp_path, ScriptedPool({}), "eager", "triton", blocks=THREE, stop_after=first - 0.5)
    records = run_folder.read_records(tmp_path)[0]
    assert len(records) == 4 and len({r.case.block for r in records}) == 1
    assert {r.status for r in records} == {"ok"}


@pytest.mark.parametrize(("stop_after", "raised"), [(0.1, on_gpu.TimeIsUp), (None, KeyboardInterrupt)])
def test_a_run_stops_while_it_prepares(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop_after: float | None, raised: type[BaseException]
) -> None:
    def hang(pool: ScriptedPool, role: str, method: str, params: Any) -> None:
        if method == "prepare":
            if raised is KeyboardInterrupt:
                signal.pthread_kill(main_thread().ident, signal.SIGINT)
            time.sleep(3.0)

    monkeypatch.setattr(ScriptedPool, "before", hang)
    began = time.monotonic()
    with pytest.raises(raised):
        run(tmp_path, ScriptedPool({}), "eager", stop_after=stop_after)
    assert time.monotonic() - began < 2.5


def test_edge_cases_are_checked_and_not_timed(tmp_path: Path) -> None:
    pool = ScriptedPool({})
    records = run(tmp_path, pool, "eager", "triton", suite="check", case="odd", directions=("fwd",))
    assert {r.status for r in records.values()} == {"ok"} and not any(r.measurement for r in records.values())
    assert pool.measured == [] and pool.calls["trace", "triton"] == 0


def test_records_are_read_in_the_order_of_the_plan(tmp_path: Path, two_runners: ScriptedPool) -> None:
    """A run writes them batch by batch, in another order."""
    records = run(tmp_path, two_runners, "xla", "triton", blocks=THREE)
    written = [json.loads(line)["id"] for line in (tmp_path / "records.jsonl").read_text().splitlines()]
    plan = resolve(THREE, suite="quick", cases=["llama-8b"], dtypes=["bf16"], implementations=["xla", "triton"])
    run_folder.create(tmp_path, {"segments": [], "plan": plan.to_json()})
    planned = [f"{case.id}/{i.name}" for case, found in plan.work for i in found]
    assert [r.id for r in run_folder.read_records(tmp_path)[0]] == planned != written == list(records)
    (tmp_path / "run.json").write_text('{"plan": {"work": [7]}}')
    assert [r.id for r in run_folder.read_records(tmp_path)[0]] == written


def test_a_resumed_case_is_done_whole(tmp_path: Path) -> None:
    """Also what was not named, if it has a record: that one's segment is over."""
    plan = resolve(
        ("vector_add", "gelu"), suite="quick", cases=["64Mi", "llama-8b"], directions=["fwd"], implementations=["xla"]
    )
    vector_add, gelu = (case.id for case, _ in plan.work)
    done = {f"{vector_add}/triton", f"{vector_add}/eager", f"{gelu}/xla", f"{gelu}/triton"}
    found = {case.id: [i.name for i in each] for case, each in run_module.with_whole_cases(plan, done).work}
    assert found == {vector_add: ["xla", "eager", "triton"], gelu: ["xla"]}


def test_a_record_stays_where_its_package_is_missing_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run gone on with where an optional package is not installed: its case is measured again whole, but for that."""

    def execute(pool: ScriptedPool, *implementations: str, resume: bool) -> dict[str, Record]:
        monkeypatch.setattr(run_module, "WorkerPool", lambda logs, environment: pool)
        plan = resolve(["vector_add"], suite="quick", cases=["64Mi"], implementations=implementations)
        assert run_module.execute(plan, folder=folder, target=None, resume=resume) == 0
        return {r.implementation: r for r in run_folder.read_records(folder)[0]}

    monkeypatch.setattr(run_module.host, "gpu_present", lambda: True)
    monkeypatch.setattr(ScriptedPool, "stop", lambda pool: None, raising=False)
    folder = tmp_path / "run"
    lacking = WorkerError("skipped", "liger-kernel is not installed")
    before = execute(ScriptedPool({("prepare", "cuda"): (1, lacking)}), "triton", "library", "cuda", resume=False)
    assert [before[name].status for name in ("triton", "library", "cuda")] == ["ok", "ok", "skipped"]
    capsys.readouterr()
    without = ScriptedPool({("prepare", name): (1, lacking) for name in ("library", "cuda")})
    after = execute(without, "xla", resume=True)
    assert {name: (r.status, r.segment) for name, r in after.items()} == {
        "xla": ("ok", "s2"), "triton": ("ok", "s2"), "library": ("ok", "s1"), "cuda": ("skipped", "s2"),
    }
    assert after["library"] == before["library"]
    id = after["library"].id
    assert f"kept     {id}  as of segment s1; now: liger-kernel is not installed" in capsys.readouterr().err


def test_a_case_of_other_sizes_is_done_again(tmp_path: Path) -> None:
    """An id says no sizes, and a suite's may change between two versions."""
    plan = resolve(["vector_add"], suite="quick", cases=["64Mi"], implementations=["xla", "triton"])
    (case, _), *_ = plan.work
    folder = tmp_path / "run"
    run_folder.create(folder, {"target": "h200", "segments": []})
    older = replace(case, sizes={name: size + 1 for name, size in case.sizes.items()})
    for made in (made_record(older, "xla", "xla", "compiled"), made_record(case, "triton", "triton", "compiled")):
        run_folder.append(folder, made)
    assert list(run_module._open(plan, folder, "h200", resume=True)) == [f"{case.id}/triton"]
