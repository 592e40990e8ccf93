"""Cases over several GPUs: with ranks that answer from a script, and on two CPU processes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from commands import xlafuse_process
from full_marks import first_of_each
from worker_programs import quick_compiles

from xlafuse.compare import targets
from xlafuse.compare.base import host
from xlafuse.compare.graph import store
from xlafuse.compare.graph.model import FusionGraph, Kernel
from xlafuse.compare.measure import timeline
from xlafuse.compare.measure.rank_measurement import CALLS
from xlafuse.compare.plan.plan import Plan
from xlafuse.compare.plan.selection import resolve
from xlafuse.compare.plan.speedup import LEAST_ROUNDS
from xlafuse.compare.record import run_folder
from xlafuse.compare.record.record import Record
from xlafuse.compare.report import columns, ranks
from xlafuse.compare.run import run as run_module
from xlafuse.compare.sources.result import Result
from xlafuse.compare.sources.run_source import open_run
from xlafuse.compare.spec.blocks import BLOCKS
from xlafuse.compare.workers import rank_group
from xlafuse.compare.workers.client import Worker, WorkerDied, WorkerError, WorkerTimeout, interpreter
from xlafuse.compare.workers.rank_group import joined


def a_round(device: float, exchange: float, both: float) -> dict[str, Any]:
    """Return a rank's answer to `measure`, with a slow first call, which does not count."""
    times = {
        "device_time": [1.0, device, device], "busy_time": [1.0, device, device],
        "communication": [0.5, exchange, exchange], "compute": [1.0, *[device - exchange + both] * 2],
        "both": [0.5, both, both], "launches": 1, "records": [{"name": "k", "start": 0.0, "end": 1e-6}],
    }
    return {"phases": {"forward": times}, "warm_up": None}


GRAPH = store.to_json(FusionGraph("add", "xla", (Kernel("k", "elementwise", "forward", runtime_name="k"),)))


class Ranks:
    """Two ranks, the second 1 µs slower. faults: (method, implementation) -> exception; a death ends the ranks."""

    def __init__(self, faults: dict[tuple[str, str], Exception]) -> None:
        self.faults, self.calls, self.held = faults, Counter[tuple[str, str]](), False

    def start(self, roles: Any) -> None: ...

    def restart(self, roles: Any = None) -> None: ...

    def stop(self) -> None: ...

    def ask(self, role: str, method: str, *, timeout: float = 0, **params: Any) -> Any:
        name = str(params.get("id", "")).rpartition("/")[2]
        self.calls[method, name] += 1
        if role == "reference":
            return {"y": {"rms": 1.0, "largest": 2.0, "independent_error": 0.25}} if method == "produce" else None
        assert role.endswith("-ranks-2")
        if fault := self.faults.get((method, name)):
            self.held = not isinstance(fault, WorkerDied | WorkerTimeout)
            raise fault
        assert self.held or method in ("environment", "prepare", "release"), "these ranks lack the program"
        self.held |= method == "prepare"
        return joined(method, [self.answer(method, rank) for rank in range(2)])

    @staticmethod
    def answer(method: str, rank: int) -> Any:
        device = {"name": "k", "start": 2e-6, "end": 3e-6, "grid": None, "bytes": None}
        answers: dict[str, Any] = {
            "environment": {"timer": "cupti", "device": "GPU"},
            "graph": GRAPH,
            "prepare": {
                "compile_s": 0.5, "graph": None, "command_buffers": None, "cuda_graph": None, "sent": 4000,
                "least_sent": 2000,
            },
            "measure": a_round((9 + rank) * 1e-6, 4e-6, 1e-6), "measure_mode": a_round(6e-6, 0.0, 0.0),
            "trace": {"forward": {"returned": 5e-6, "host": [], "device": [device], "began": 1000 * rank}},
            "check": {
                "errors": [{"name": "y", "error": 0.1, "tolerance": 0.2}], "device": "GPU", "backend": "simulated",
            },
        }
        return answers.get(method)


def run(
    monkeypatch: pytest.MonkeyPatch, folder: Path, pool: Ranks, names: list[str], gpus: int = 2
) -> dict[str, Record]:
    monkeypatch.setattr(host, "gpu_present", lambda: True)
    monkeypatch.setattr(host, "gpu_count", lambda: gpus)
    monkeypatch.setattr(run_module, "WorkerPool", lambda logs, environment: pool)
    plan = resolve(["mlp_parallel"], suite="parallel", implementations=names, directions=["fwd"])
    run_module.execute(plan, folder=folder, target=None, resume=False)
    return {record.implementation: record for record in run_folder.read_records(folder)[0]}


def test_a_record_has_the_times_of_both_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = run(monkeypatch, tmp_path / "run", Ranks({}), ["xla"])["xla"]
    assert record.status == "ok" and record.parallel is not None
    (result,) = open_run(tmp_path / "run").results
    assert result.row.device_time_us == pytest.approx(10)
    assert columns.BY_NAME["exposed_us"].of(result.row) == pytest.approx(4)  # the slower rank's
    lines = ranks.of([result])
    shown = columns.as_data(lines, ranks.COLUMNS)
    assert [each["rank"] for each in shown] == [0, 1]
    assert [each["device_time_us"] for each in shown] == pytest.approx([9, 10])
    assert [each["exposed_us"] for each in shown] == pytest.approx([3, 4])
    assert [each["imbalance_us"] for each in shown] == [0, 0]
    assert [each["compute_slowdown"] for each in shown] == pytest.approx([1, 7 / 6])
    assert [each["link_gb_per_s"] for each in shown] == pytest.approx([1, 1])
    assert "exposed" in ranks.render(lines)
    document = timeline.load(run_folder_file(tmp_path / "run", record))
    kernels = [event for event in document["traceEvents"] if event["name"] == "k" and event["ph"] == "X"]
    assert sorted(event["ts"] for event in kernels) == [0, 1]  # the second rank began 1 µs later
    assert len({event["pid"] for event in kernels}) == 2
    merged = timeline.merge([document, document])
    assert len({event["pid"] for event in merged["traceEvents"]}) == 4


class UnevenRanks(Ranks):
    """Without exchanges rank 0 takes 6 µs and rank 1 takes 2."""

    @staticmethod
    def answer(method: str, rank: int) -> Any:
        return a_round((6 - 4 * rank) * 1e-6, 0.0, 0.0) if method == "measure_mode" else Ranks.answer(method, rank)


def test_waiting_for_a_gpu_with_more_work_is_not_exposed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(monkeypatch, tmp_path / "run", UnevenRanks({}), ["xla"])
    (result,) = open_run(tmp_path / "run").results
    shown = columns.as_data(ranks.of([result]), ranks.COLUMNS)
    assert [each["imbalance_us"] for each in shown] == pytest.approx([0, 4])
    assert [each["exposed_us"] for each in shown] == pytest.approx([3, 4])


def run_folder_file(folder: Path, record: Record) -> Any:
    from xlafuse.compare.record.run_files import recorded_file

    assert record.trace is not None and record.trace.file is not None
    return recorded_file(folder, record, record.trace.file)


def test_a_fault_costs_its_own_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    faults: Any = {
        ("check", "xla"): WorkerTimeout("no answer within 60 s"),
        ("measure_mode", "xla-sharded"): WorkerError("skipped", "no program without them"),
        ("measure", "xla-in-order"): WorkerDied("rank 1 died"),
        ("measure_mode", "eager"): WorkerDied("rank 0 died"),
        ("graph", "xla-sharded"): WorkerError("failed", "a graph that cannot be read"),
    }
    pool = Ranks(faults)
    found = run(monkeypatch, tmp_path / "run", pool, ["xla", "xla-sharded", "xla-in-order", "eager"])
    assert {name: record.status for name, record in found.items()} == {
        "xla": "timeout", "xla-sharded": "ok", "xla-in-order": "failed", "eager": "ok",
    }
    assert found["xla-sharded"].parallel is not None
    assert found["xla-sharded"].parallel.alone_unavailable == "no program without them"
    assert found["xla-sharded"].graph is None and found["xla-sharded"].trace is not None
    assert found["eager"].graph is not None
    view = ranks.render(ranks.of(open_run(tmp_path / "run").results))
    assert view.count("no program without them") == view.count("rank 0 died") == 1
    assert pool.calls["prepare", "eager"] == 2  # fresh ranks need the program again


def test_too_few_gpus_skip_the_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Ranks({})
    found = run(monkeypatch, tmp_path / "run", pool, ["xla", "eager"], gpus=1)
    assert {record.status for record in found.values()} == {"skipped"}
    assert found["xla"].detail is not None and "2 GPUs; this machine has 1" in found["xla"].detail
    assert not pool.calls["prepare", "xla"]


CLOCKED = Path(__file__).with_name("clocked_ranks.py")
ON_CPUS = [
    ("mlp_parallel", "odd", "joint", ("xla", "xla-sharded", "eager")),
    ("moe_parallel", "odd", "joint", ("xla",)),  # experts without a token
    ("moe_parallel", "all-on-one", "fwd", ("xla",)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("block", "shape", "direction", "names"), first_of_each(ON_CPUS))
def test_a_run_on_two_cpu_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: str, shape: str, direction: str, names: tuple[str, ...]
) -> None:
    """Each step on real ranks, whose clock alone is simulated."""

    def clocked(role: str, log: Path, environment: Any) -> Worker:
        return Worker(role, log, environment, [interpreter(role), str(CLOCKED), role])

    monkeypatch.setattr(rank_group, "Worker", clocked)
    monkeypatch.setattr(host, "gpu_present", lambda: True)
    monkeypatch.setattr(host, "gpu_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("XLA_FLAGS", quick_compiles())
    wanted = shape, "float32", direction
    case = next(c for c in BLOCKS[block].cases("check") if (c.name, c.dtype, c.direction) == wanted)
    plan = Plan("parallel", ((case, tuple(map(BLOCKS[block].implementation, names))),))
    assert run_module.execute(plan, folder=tmp_path / "run", target=None, resume=False) == 0
    expected = {"y"} | ({f"d_{t.name}" for t in BLOCKS[block].inputs} if direction == "joint" else set())
    records = run_folder.read_records(tmp_path / "run")[0]
    assert [record.implementation for record in records] == [*names]
    for record in records:
        assert {check.name for check in record.errors} == expected
        assert [len(calls) for calls in record.times["forward"].device_time] == [CALLS] * LEAST_ROUNDS
        assert record.graph is not None and record.trace is not None and record.trace.file is not None
        assert record.parallel is not None and len(record.parallel.ranks) == 2
        for rank in record.parallel.ranks:
            assert (rank.device_time, rank.communication, rank.overlap) == (2e-6, 1e-6, 1e-6)
            assert rank.alone_device_time == (None if record.implementation == "xla-sharded" else 2e-6)
            assert (rank.sent_bytes is None) == (record.implementation == "eager")
            assert rank.least_sent_bytes >= 0


def collectives(result: Result) -> list[Kernel]:
    """Return its exchanges between GPUs, with predicted times."""
    graph = result.predicted_graph
    return [kernel for kernel in (graph and graph.kernels) or () if kernel.kind == "collective"]


@pytest.mark.full
def test_a_block_is_compiled_for_eight_absent_gpus(tmp_path: Path) -> None:
    """XLA and Inductor exchange the same bytes, in the same predicted time. The routing's rows are known to neither."""
    done = xlafuse_process(
        "run", "mlp_parallel", "moe_parallel", "--size", "ranks=8", "--direction", "fwd",
        "--target", "h100", "-i", "xla,inductor", "--out", str(tmp_path / "run"), timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = {(r.row.block, r.row.implementation): r for r in open_run(tmp_path / "run").results}
    times = {}
    for name in ("xla", "inductor"):
        exchanges = collectives(found["mlp_parallel", name])
        assert [kernel.facts["gpus"] for kernel in exchanges] == [8, 8]
        times[name] = [kernel.predicted_us for kernel in exchanges]
    assert times["xla"] == pytest.approx(times["inductor"]) and min(filter(None, times["xla"])) > 400
    routed = found["moe_parallel", "inductor"].record
    assert routed is not None and routed.status == "skipped" and "sizes" in str(routed.detail)


@pytest.mark.gpu
def test_graphs_over_two_gpus_replay_kernels_and_copies(tmp_path: Path) -> None:
    """The main cases, whose second input set has another routing than the one that is captured."""
    if host.gpu_count() < 2:
        pytest.skip("needs two GPUs")
    done = xlafuse_process(
        "run", "--suite", "parallel", "-i", "triton-cudagraphs,triton-all-slots-cudagraphs",
        "--out", str(tmp_path / "run"), timeout=560,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    results = open_run(tmp_path / "run").results
    assert len(results) == 4
    for result in results:
        assert result.record is not None and result.record.status == "ok" and result.record.parallel is not None
        assert result.record.measurement is not None and result.record.measurement.command_buffers is not None
        replayed, launches = result.record.measurement.command_buffers["forward"]
        assert launches > 10 and replayed == launches
        assert all(rank.communication > 1e-4 for rank in result.record.parallel.ranks), "copies between the GPUs"


@pytest.mark.gpu
def test_exchanges_of_pytorch_have_predicted_times_beside_measured_ones(tmp_path: Path) -> None:
    if host.gpu_count() < 2 or targets.of_device(host.gpus()[0].name) not in ("h100", "h200"):
        pytest.skip("needs two GPUs whose links were measured")
    names = ("eager", "inductor", "triton", "triton-put")
    done = xlafuse_process(
        "run", "--suite", "parallel", "-i", ",".join(names), "--direction", "joint", "--out", str(tmp_path / "run"),
        timeout=560,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for result in open_run(tmp_path / "run").results:
        exchanges = collectives(result)
        assert len(exchanges) >= 4 and all(kernel.device_time_us is not None for kernel in exchanges), result.id
        # A collective's time on one GPU has the wait for the other one, so a copy alone is held to the prediction.
        for kernel in exchanges:
            assert kernel.predicted_us is not None, (result.id, kernel.name)
            large = (kernel.bytes_read or 0) > 1 << 20
            if kernel.name.startswith("xlafuse.exchange") and large:
                assert kernel.device_time_us == pytest.approx(kernel.predicted_us, rel=0.5), (result.id, kernel.name)
