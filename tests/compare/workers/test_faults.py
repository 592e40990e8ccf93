"""Real runs in which implementations misbehave in every way that docs/faults.md lists, all in one run: each fault costs
exactly its own record, which says why, and every other record is complete and right."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from xlafuse.compare.base import host
from xlafuse.compare.base.paths import PROJECT
from xlafuse.compare.plan.plan import Plan
from xlafuse.compare.plan.speedup import LEAST_ROUNDS
from xlafuse.compare.record import run_folder
from xlafuse.compare.record.record import Record
from xlafuse.compare.run import run
from xlafuse.compare.spec.blocks import BLOCKS
from xlafuse.compare.spec.case import Case
from xlafuse.compare.spec.implementation import Implementation
from xlafuse.compare.workers import client, pool
from xlafuse.compare.workers.pool import WorkerPool

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
GPU = pytest.mark.gpu
SOUND = ("right", "prints_megabytes", "right_at_last")
TIME_LIMIT = 5.0


def _implementations() -> dict[str, Implementation]:
    spec = importlib.util.spec_from_file_location("faulty_worker", HERE / "faulty_worker.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sound = BLOCKS["softmax"]
    try:
        spec.loader.exec_module(module)
    finally:
        BLOCKS["softmax"] = sound  # in this process the table stays as it is
    return {i.name: i for i in (*sound.implementations, *module.FAULTY)}


class ImpatientPool(WorkerPool):
    """Gives those that never answer seconds instead of minutes."""

    def ask(self, role: str, method: str, *, timeout: float = 900.0, **params: Any) -> Any:
        if str(params.get("id", "")).endswith(("hangs", "endless_kernel")):
            timeout = min(timeout, TIME_LIMIT)
        return super().ask(role, method, timeout=timeout, **params)


class FaultyWorker(client.Worker):
    def __init__(self, role: str, log: Path, environment: dict[str, str]) -> None:
        command = [client.interpreter(role), str(HERE / "faulty_worker.py"), role]
        super().__init__(role, log, environment, command=command)


def run_all(folder: Path, names: list[str], *, target: str | None, packages: Path | None = None) -> dict[str, Record]:
    """One run of the small softmax with these implementations, in this order; `packages` come before installed ones."""
    known = _implementations()
    case = Case("softmax", "odd", {"rows": 7, "columns": 257}, "float32", "fwd")
    plan = Plan("quick", ((case, tuple(known[name] for name in names)),))
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("TRITON_INTERPRET", raising=False)  # the tests of this process may interpret
        if packages:
            patch.setenv("PYTHONPATH", str(packages), prepend=os.pathsep)
        patch.setattr(pool, "Worker", FaultyWorker)
        patch.setattr(run, "WorkerPool", ImpatientPool)
        patch.setattr(host, "gpu_present", lambda: True)
        assert run.execute(plan, folder=folder, target=target, resume=False) == 1  # something is wrong or failed
    records, warnings = run_folder.read_records(folder)
    assert not warnings
    lines = (folder / "records.jsonl").read_text().splitlines()
    assert Counter(json.loads(line)["implementation"] for line in lines) == Counter(names)  # one each, no more
    return {r.implementation: r for r in records}


IN_A_CALL = [
    ("wrong_scale", "wrong", "y: error .* exceeds tolerance"),
    ("not_a_number", "wrong", "y: error inf exceeds tolerance"),
    ("unwritten_element", "wrong", "y: error inf exceeds tolerance"),
    ("cached_result", "wrong", "y: error .* exceeds tolerance"),
    ("changes_input", "wrong", "changed its inputs: x"),
    ("missing_output", "wrong", "no output 'y'"),
    ("wrong_shape", "wrong", r"shape \(1, 257\), expected \(7, 257\)"),
    ("raises", "failed", "ValueError: no such kernel"),
    ("killed", "failed", "worker died .signal SIGKILL."),
    ("segfault", "failed", "worker died .signal SIGSEGV."),
    ("leaves", "failed", "worker died .exit code 0."),
    ("hangs", "timeout", "no answer within 5 s"),
    ("out_of_memory", "failed", "memory"),
    ("import_fails", "failed", "No module named 'no_such_module'"),
    ("xla", "failed", "RuntimeError: this jax is broken"),
    ("breaks_device", "failed", "illegal memory access.*could not use the GPU any more"),
]
ON_A_GPU = [
    ("side_stream", "wrong", "y is written on another stream"),
    ("late_thread", "wrong", "y is written on another stream"),
    ("endless_kernel", "timeout", "no answer within 5 s"),
    ("illegal_access", "failed", "(?s)illegal memory access.*could not use the GPU any more"),
]
IN_XLA = [
    ("xla_wrong_scale", "wrong", "y: error .* exceeds tolerance"),
    ("xla_out_of_memory", "failed", "[Oo]ut of memory"),
    ("xla_error", "failed", "no_such_function"),
]
IN_A_COMPILE = [
    ("xla_error", "failed", "no_such_function"),
    ("inductor_error", "failed", "power of 2"),
    ("triton_error", "failed", "power of 2"),
    ("nvrtc_error", "failed", "(?s)NVRTC could not compile.*undeclared_function"),
]


def each(faults: list[tuple[str, str, str]], *marks: pytest.MarkDecorator) -> list[Any]:
    return [pytest.param(*fault, id=fault[0], marks=marks) for fault in faults]


@functools.cache
def has_gpu() -> bool:
    return host.gpu_present()


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Record]:
    """A run that executes and times; on the CPU where there is no GPU."""
    names = [name for name, _, _ in IN_A_CALL]
    if has_gpu():
        names += [*(name for name, _, _ in ON_A_GPU), "joined_side_stream", "keeps_l2"]
    first, *others = SOUND
    place = tmp_path_factory.mktemp("measured")
    (place / "jax.py").write_text("raise RuntimeError('this jax is broken')")
    return run_all(place / "run", [first, *names, *others], target=None, packages=place)


@pytest.fixture(scope="module")
def measured_in_xla(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Record]:
    names = ["xla", *(name for name, _, _ in IN_XLA), "xla_right"]
    return run_all(tmp_path_factory.mktemp("measured_in_xla") / "run", names, target=None)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Record]:
    """A run that compiles for an H200."""
    names = ["xla", "triton", *(name for name, _, _ in IN_A_COMPILE), "inductor", "cuda"]
    return run_all(tmp_path_factory.mktemp("compiled") / "run", names, target="h200")


def assert_costs_itself(records: dict[str, Record], name: str, status: str, reason: str) -> None:
    entry = records[name]
    assert (entry.status, entry.measurement) == (status, None), entry
    assert entry.detail and re.search(reason, entry.detail), entry.detail


@pytest.mark.parametrize(("name", "status", "reason"), [*each(IN_A_CALL), *each(ON_A_GPU, GPU)])
def test_a_fault_in_a_call_costs_itself(measured: dict[str, Record], name: str, status: str, reason: str) -> None:
    assert_costs_itself(measured, name, status, reason)


@pytest.mark.parametrize("name", [*SOUND, pytest.param("joined_side_stream", marks=GPU)])
def test_the_sound_ones_beside_them_are_complete(measured: dict[str, Record], name: str) -> None:
    assert_complete(measured[name])


@pytest.mark.gpu
def test_l2_that_a_call_keeps_is_given_back_and_reported(measured: dict[str, Record]) -> None:
    entry = measured["keeps_l2"]
    assert entry.status == "ok" and "of L2 reserved for persisting accesses" in str(entry.detail), entry


@pytest.mark.parametrize(("name", "status", "reason"), each(IN_XLA))
def test_a_fault_in_xla_costs_itself(
    measured_in_xla: dict[str, Record], name: str, status: str, reason: str
) -> None:
    assert_costs_itself(measured_in_xla, name, status, reason)
    for sound in ("xla", "xla_right"):
        assert_complete(measured_in_xla[sound])


def assert_complete(entry: Record) -> None:
    assert entry.status == "ok" and entry.detail is None, entry
    assert all(check.passes for check in entry.errors) and len(entry.errors) == 1
    assert entry.measurement and len(entry.measurement.wall_time) == LEAST_ROUNDS
    if has_gpu():
        assert len(entry.times["forward"].device_time) == LEAST_ROUNDS


@pytest.mark.full
@pytest.mark.parametrize(("name", "status", "reason"), each(IN_A_COMPILE))
def test_a_compile_error_costs_itself(compiled: dict[str, Record], name: str, status: str, reason: str) -> None:
    assert_costs_itself(compiled, name, status, reason)


@pytest.mark.full
@pytest.mark.parametrize("name", ["xla", "triton", "inductor", "cuda"])
def test_the_other_compiles_are_complete(compiled: dict[str, Record], name: str) -> None:
    entry = compiled[name]
    assert entry.status == "compiled" and entry.graph and entry.kernels["forward"].launches, entry


def test_the_table_of_faults_names_tests_that_exist() -> None:
    text = (PROJECT / "docs" / "faults.md").read_text()
    named = re.findall(r"`(test_\w+\.py)::(\w+)(?:\[([\w-]+)\])?`", text)
    sources = {file: [path.read_text() for path in (PROJECT / "tests").rglob(file)] for file, _, _ in named}

    def exists(file: str, test: str, parameter: str) -> bool:
        return any(f"def {test}(" in text and (not parameter or f'"{parameter}"' in text) for text in sources[file])

    missing = [each for each in named if not exists(*each)]
    assert named and not missing
    tables = [table.split("\n\n")[0] for table in text.split("\n| fault")[1:]]
    rows = [line for table in tables for line in table.splitlines()[2:] if line.startswith("| ")]
    assert rows and all("::test_" in row for row in rows), "a fault without a test"
    proven = {parameter for _, _, parameter in named}
    assert {name for name, _, _ in (*IN_A_CALL, *ON_A_GPU, *IN_XLA, *IN_A_COMPILE)} <= proven
