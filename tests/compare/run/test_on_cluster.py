"""A run on several machines: each case on one node, a lost shard done again, and one folder as of one machine."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from made_records import made_record, with_fields

from xlafuse.compare.base import folder_bytes, host
from xlafuse.compare.base.usage import UsageError
from xlafuse.compare.cli.main import cli
from xlafuse.compare.plan import selection
from xlafuse.compare.plan.plan import Plan
from xlafuse.compare.record import run_files, run_folder
from xlafuse.compare.run import ray_cluster, shard_on_node
from xlafuse.compare.run.ray_cluster import ConnectionLost, TaskLost
from xlafuse.compare.run.run import execute

PROJECT = Path(__file__).parents[3]
NEEDS_RAY = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason=f"needs Ray: pip install '{ray_cluster.REQUIREMENT}'"
)
SELECTED = ("gelu", "softmax")


def plan(*implementations: str) -> Plan:
    return selection.resolve(SELECTED, suite="tour", implementations=implementations or ("cuda", "triton"))


# The driver, with a cluster of the test's own. -----------------------------------------------------------------------

Node = Callable[[Plan, Path], None]


def write(folder: Path, plan: Plan, *, most: int = 1000, status: str = "compiled") -> None:
    """Write up to `most` records of the plan, as a node does."""
    run_folder.write_run(folder, {**run_folder.read_run(folder), "segments": [{"id": "s1", "ceilings": None}]})
    for case, implementation in [(case, i) for case, found in plan.work for i in found][:most]:
        record = made_record(
            case=case, implementation=implementation.name, compiler=implementation.name, status=status, segment="s1",
            graph=f"graphs/{case.id.replace('/', '-')}-{implementation.name}.json.gz",
        )
        assert record.graph is not None
        (folder / "graphs").mkdir(exist_ok=True)
        (folder / record.graph).write_text(record.id)
        run_folder.append(folder, record)
    run_files.pack_files(folder)
    (folder / "logs").mkdir()
    (folder / "logs" / "xla.log").write_text("from a node")


def whole(plan: Plan, folder: Path) -> None:
    write(folder, plan)


def lost(plan: Plan, folder: Path) -> None:
    raise TaskLost("the node died")


def half(plan: Plan, folder: Path) -> None:
    write(folder, plan, most=1)


class FakeCluster:
    """Nodes that do a shard when its result is asked for: the first task by the first of `nodes`, and so on."""

    nodes, slots, cpus, gpus, address = 2, 1, 1, 0, "ray://fake:10001"

    def __init__(self, scratch: Path, *nodes: Node, then: Node = whole, endless: bool = False) -> None:
        self.left, self.then, self.scratch, self.endless = list(nodes), then, scratch, endless
        self.plans: list[Plan] = []
        self.cancelled: list[int] = []

    def submit(self, request: bytes) -> int:
        folder = self.scratch / str(len(self.plans))
        folder_bytes.unpack(request, folder)
        self.plans.append(Plan.from_json(run_folder.read_run(folder)["plan"]))
        assert not run_folder.read_records(folder)[0]
        return len(self.plans) - 1

    def ready(self, references: Sequence[int], timeout: float | None) -> list[int]:
        return [] if self.endless and not self.cancelled else [references[0]]

    def result(self, reference: int) -> bytes:
        folder = self.scratch / str(reference)
        (self.left.pop(0) if self.left else self.then)(self.plans[reference], folder)
        return folder_bytes.pack(folder)

    def cancel(self, references: Sequence[int]) -> None:
        self.cancelled += references


def run_on(cluster: FakeCluster, folder: Path, **options: Any) -> int:
    arguments = {"folder": folder, "target": "h200", "resume": False, "plan": plan(), **options}
    return execute(**arguments, cluster=cluster)  # type: ignore[arg-type]


def test_parts_become_one_run(tmp_path: Path) -> None:
    cluster = FakeCluster(tmp_path / "nodes")
    assert run_on(cluster, tmp_path / "run") == 0
    assert len(cluster.plans) > 1
    records, warnings = run_folder.read_records(tmp_path / "run")
    assert not warnings and {record.id for record in records} == plan().record_ids
    for record in records:
        assert run_files.recorded_file(tmp_path / "run", record, str(record.graph)).read_bytes() == record.id.encode()
    segments = [{r.segment for r in records if r.id in each.record_ids} for each in cluster.plans]
    assert all(len(found) == 1 for found in segments)  # a case's records are of one node
    assert sorted(s for found in segments for s in found if s) == [
        segment["id"] for segment in run_folder.read_run(tmp_path / "run")["segments"]
    ]
    assert [p.read_text() for p in sorted((tmp_path / "run" / "logs").rglob("xla.log"))] == ["from a node"] * 2


@pytest.mark.parametrize("node", [lost, half])
def test_a_shard_that_is_lost_is_done_again_as_far_as_it_is_missing(node: Node, tmp_path: Path) -> None:
    cluster = FakeCluster(tmp_path / "nodes", node)
    assert run_on(cluster, tmp_path / "run") == 0
    assert {r.id for r in run_folder.read_records(tmp_path / "run")[0]} == plan().record_ids
    first, again = cluster.plans[0].record_ids, cluster.plans[-1].record_ids
    assert len(again) == len(first) - (node is half) and again <= first


def test_a_case_on_gpus_is_measured_again_completely(tmp_path: Path) -> None:
    """Times of two segments are not compared."""
    cluster = FakeCluster(tmp_path / "nodes", half)
    assert run_on(cluster, tmp_path / "run", target=None) == 0
    assert cluster.plans[-1].record_ids == cluster.plans[0].record_ids
    records = run_folder.read_records(tmp_path / "run")[0]
    for case, _ in plan().work:
        assert len({record.segment for record in records if record.case == case}) == 1


def test_a_shard_that_is_always_lost_is_given_up_and_resumed_later(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run_on(FakeCluster(tmp_path / "nodes", then=lost), tmp_path / "run") == 1
    assert "the node died" in capfd.readouterr().err
    cluster = FakeCluster(tmp_path / "others")
    assert run_on(cluster, tmp_path / "run", resume=True) == 0
    assert {r.id for r in run_folder.read_records(tmp_path / "run")[0]} == plan().record_ids


def test_a_stop_keeps_the_records_that_nodes_have_finished(tmp_path: Path) -> None:
    cluster = FakeCluster(tmp_path / "nodes", half, lost, endless=True)
    assert run_on(cluster, tmp_path / "run", stop_after=0.01) == 3
    assert len(cluster.cancelled) == len(cluster.plans)
    (kept,) = run_folder.read_records(tmp_path / "run")[0]
    resumed = FakeCluster(tmp_path / "others")
    assert run_on(resumed, tmp_path / "run", resume=True) == 0
    assert kept.id not in {id for each in resumed.plans for id in each.record_ids}


def test_a_lost_connection_keeps_the_finished_parts(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def gone(plan: Plan, folder: Path) -> None:
        raise ConnectionLost("the connection was lost")

    assert run_on(FakeCluster(tmp_path / "nodes", whole, gone), tmp_path / "run") == 1
    assert "the connection was lost" in capfd.readouterr().err
    assert run_folder.read_records(tmp_path / "run")[0]


def test_an_ok_record_stays_where_the_node_skips_its_implementation(tmp_path: Path) -> None:
    def skips(plan: Plan, folder: Path) -> None:
        write(folder, plan, status="skipped")

    assert run_on(FakeCluster(tmp_path / "nodes", half, then=lost), tmp_path / "run", target=None) == 1
    before = {r.id: r for r in run_folder.read_records(tmp_path / "run")[0]}
    for record in before.values():
        run_folder.append(tmp_path / "run", with_fields(record, status="ok"))
    run_on(FakeCluster(tmp_path / "others", then=skips), tmp_path / "run", target=None, resume=True)
    after = {r.id: r.status for r in run_folder.read_records(tmp_path / "run")[0]}
    assert {id: after[id] for id in before} == dict.fromkeys(before, "ok")
    assert after.keys() == plan().record_ids


@pytest.mark.parametrize("gpu, cores", [("0", {0, 1, 2, 3}), ("1", {4, 5, 6, 7}), ("2", None), ("GPU-5c1e", None)])
def test_tasks_of_one_machine_take_cores_of_their_own(
    gpu: str, cores: set[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU beyond the cores, or one without a number, leaves the task all cores."""
    taken: list[set[int]] = []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpu)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))
    monkeypatch.setattr(os, "sched_setaffinity", lambda process, mine: taken.append(set(mine)))
    shard_on_node.take_cores(4)
    assert taken == ([] if cores is None else [cores])


# Refusals before the run. -------------------------------------------------------------------------------------------


@contextlib.contextmanager
def listening() -> Iterator[str]:
    """Yield an address that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"ray://127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--on", "nowhere"], "ray://HOST:PORT"),
        (["--on", "ray://127.0.0.1:1"], "not reachable"),
        (["--on", "ray://127.0.0.1:99999"], "not reachable"),
        (["--on", "ray://127.0.0.1:1", "--shard", "1/2"], "--shard"),
        (["--on", "ray://127.0.0.1:1", "--traffic"], "--traffic"),
        (["--on", "ray://127.0.0.1:1", "--with", "mine.py:f"], "--with"),
    ],
)
def test_what_cannot_be_run_is_refused_before_the_run(arguments: list[str], words: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(cli, ["run", "gelu", *arguments, "--out", str(tmp_path / "run")])
    assert done.exit_code == 2 and words in done.output and "Traceback" not in done.output
    assert not (tmp_path / "run").exists()


def test_without_ray_the_command_that_installs_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "versions", lambda packages: dict.fromkeys(packages))
    with listening() as address, pytest.raises(UsageError, match=r"pip install .*ray\[client\]"):
        with ray_cluster.connected(address, gpu=False):
            pass


@pytest.mark.parametrize(("failures", "attempts"), [(["slow"] * 2, 3), (["slow"] * 9, 3), (["other"], 1)])
def test_a_client_process_that_does_not_start_is_tried_again(
    failures: list[str], attempts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only a failure of the process that the cluster starts for a client may be gone the next time."""
    texts = {"slow": "Initialization failure from server:\nStarting Ray client server failed", "other": "a mismatch"}
    waiting, tried = list(failures), list[str]()

    class Ray:
        __version__ = "2.60.0"

        @staticmethod
        def init(address: str, **options: Any) -> None:
            tried.append(address)
            if waiting:
                raise ConnectionAbortedError(texts[waiting.pop()])

        @staticmethod
        def shutdown() -> None: ...

    monkeypatch.setitem(sys.modules, "ray", Ray)
    monkeypatch.setattr(host, "missing", lambda requirements: None)
    monkeypatch.setattr(ray_cluster, "_cluster", lambda address, gpu: "connected")
    connects = len(failures) < attempts and "other" not in failures
    with listening() as address:
        with contextlib.nullcontext() if connects else pytest.raises(UsageError, match="does not connect"):
            with ray_cluster.connected(address, gpu=False) as found:
                assert str(found) == "connected"
    assert len(tried) == attempts


# A cluster of two nodes. ---------------------------------------------------------------------------------------------

QUICK_TO_MISS_A_NODE = {
    "RAY_health_check_initial_delay_ms": "500", "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "1000", "RAY_health_check_failure_threshold": "3",
}


@dataclass
class TwoNodes:
    """A cluster of two nodes. address: for Ray Client. inside: for a driver on one of its nodes."""

    address: str
    inside: str
    second: subprocess.Popen[bytes]
    scratch_of_second: Path


def start(folder: Path, *arguments: str, ready: str, **environment: str) -> subprocess.Popen[bytes]:
    """Start a node, and wait until it prints `ready`."""
    inherited = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    shared = ("--block", "--num-cpus=1", "--disable-usage-stats", "--object-store-memory=100000000")
    with (folder / "log").open("wb") as log:
        node = subprocess.Popen(
            [sys.executable, "-m", "ray.scripts.scripts", "start", *shared, "--node-ip-address=127.0.0.1", *arguments],
            env={**inherited, **QUICK_TO_MISS_A_NODE, "PYTHONPATH": str(PROJECT), **environment}, stdout=log,
            stderr=subprocess.STDOUT, start_new_session=True,
        )
    until = time.monotonic() + 120
    while ready not in (text := (folder / "log").read_text()):
        assert node.poll() is None and time.monotonic() < until, text
        time.sleep(0.1)
    return node


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.fixture(scope="module")
def nodes() -> Iterator[TwoNodes]:
    folder = Path(tempfile.mkdtemp(prefix="ray"))  # a socket's path may have 107 characters, and tmp_path is long
    port, client, running = free_port(), free_port(), []
    ready = "To terminate the Ray runtime"
    try:
        for name in ("1", "2"):
            (folder / name).mkdir()
        head = ("--head", f"--port={port}", f"--ray-client-server-port={client}", "--include-dashboard=false")
        running.append(start(folder / "1", *head, f"--temp-dir={folder}/r", ready=ready))
        running.append(start(folder / "2", f"--address=127.0.0.1:{port}", ready=ready, TMPDIR=str(folder / "2")))
        yield TwoNodes(f"ray://127.0.0.1:{client}", f"127.0.0.1:{port}", running[1], folder / "2")
    finally:
        for node in running:
            kill(node)
        shutil.rmtree(folder, ignore_errors=True)


def kill(node: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(node.pid, signal.SIGKILL)
    node.wait()


@NEEDS_RAY
@pytest.mark.slow
def test_a_cluster_without_gpus_or_of_another_version_is_refused(
    nodes: TwoNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match="no node has a GPU"), ray_cluster.connected(nodes.inside, gpu=True):
        pass
    here = host.xlafuse_version()
    monkeypatch.setattr(host, "xlafuse_version", lambda: "99.0")
    with pytest.raises(UsageError, match=f"needs xlafuse 99.0.* has {here}"):
        with ray_cluster.connected(nodes.inside, gpu=False):
            pass


@NEEDS_RAY
@pytest.mark.slow
def test_a_killed_node_costs_a_retry_and_the_run_is_that_of_one_machine(nodes: TwoNodes, tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    program = [sys.executable, "-m", "xlafuse", "run", *SELECTED, "--suite", "tour", "-i", "cuda", "--target", "h200"]
    program += ["--direction", "fwd"]
    with (tmp_path / "stderr").open("wb") as output:
        run = subprocess.Popen(
            [*program, "--out", str(tmp_path / "two"), "--on", nodes.address], cwd=PROJECT, env=environment,
            stdout=subprocess.DEVNULL, stderr=output,
        )
    try:
        until = time.monotonic() + 120
        while not list(nodes.scratch_of_second.glob("xlafuse-shard-*/run/logs/*.log")):  # a worker has started there
            assert run.poll() is None and time.monotonic() < until, (tmp_path / "stderr").read_text()
            time.sleep(0.1)
        kill(nodes.second)
        here = subprocess.run([*program, "--out", str(tmp_path / "one")], cwd=PROJECT, env=environment, timeout=200)
        assert run.wait(200) == 0 == here.returncode, (tmp_path / "stderr").read_text()
    finally:
        run.kill()
    assert "was lost" in (tmp_path / "stderr").read_text()
    assert facts(tmp_path / "two") == facts(tmp_path / "one")
    assert len(facts(tmp_path / "two")) == 2


def facts(folder: Path) -> list[Any]:
    """Return the records without segments and compile times, and the contents of their files."""
    records, warnings = run_folder.read_records(folder)
    assert not warnings
    return [
        (
            with_fields(record, segment=None, compile_s=None).to_json(),
            *(run_files.recorded_file(folder, record, str(name)).read_bytes() for name in (record.graph, record.dumps)),
        )
        for record in records
    ]
