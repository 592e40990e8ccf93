"""A real run for an H200 on a machine that need not have one: end to end, through the command line."""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from commands import xlafuse, xlafuse_process
from made_records import made_record

from xlafuse.compare.base import host
from xlafuse.compare.graph import store
from xlafuse.compare.graph.build.from_inductor import from_inductor
from xlafuse.compare.record.run_files import RunFile
from xlafuse.compare.run import for_target
from xlafuse.compare.spec.blocks import BLOCKS
from xlafuse.compare.workers.client import WorkerError
from xlafuse.triton_side.inductor import dump

pytestmark = pytest.mark.slow
PROJECT = Path(__file__).parents[3]
IMPLEMENTATIONS = ("xla", "eager", "inductor", "library", "triton", "cuda")


def rows_of(folder: Path) -> list[dict[str, Any]]:
    shown = xlafuse("inspect", folder, "--view", "times", "--json")
    rows: list[dict[str, Any]] = json.loads(shown.stdout)["rows"]
    return rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("run") / "softmax"
    selected = ["--case", "4096-columns", "--dtype", "fp32", "--direction", "train", "-i", ",".join(IMPLEMENTATIONS)]
    target = ["--target", "h200"] if host.gpu_present() else []
    done = xlafuse_process("run", "softmax", *selected, *target, "--out", str(out))
    assert done.returncode == 0, done.stderr[-3000:]
    return out


@pytest.fixture(scope="module")
def rows(folder: Path) -> list[dict[str, Any]]:
    return rows_of(folder)


def test_every_compiler_emits_code_for_the_target(rows: list[dict[str, Any]]) -> None:
    assert {row["implementation"] for row in rows} == {*IMPLEMENTATIONS}
    for row in rows:
        compiled = row["implementation"] not in ("eager", "library")
        assert row["status"] == ("compiled" if compiled else "skipped"), row
        assert (row["kernels"] or 0) > 0 or not compiled, row
        assert row["device_time_us"] is None  # and nothing is `ok` without a GPU


def test_what_has_a_cpu_path_was_checked_there(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        if row["implementation"] in ("xla", "eager", "library", "inductor", "triton"):
            assert row["checked_device"] == "cpu", row
            assert row["max_error"] <= row["tolerance"], row
            cases = row["checked_case"].split(" and ")
            assert cases == ["odd"] if row["implementation"] == "inductor" else {"odd", "odd-masked"} & {*cases}, row
        else:
            assert row["checked_device"] is None, row


def test_what_was_compiled_and_cannot_be_checked_here_is_compiled() -> None:
    checking: Future[dict[str, Any]] = Future()
    checking.set_exception(WorkerError("skipped", "the interpreter of Triton 3.6.0 does not work with numpy 2.4.6"))
    entry = made_record(BLOCKS["gelu"].cases("quick")[0], "triton", "triton", "compiled")
    for_target._join_check(entry, checking)
    assert (entry.status, entry.checked) == ("compiled", None)
    assert entry.detail is not None and entry.detail.startswith("not checked on the CPU: the interpreter")


def test_the_run_says_which_compilers_it_saw(folder: Path) -> None:
    workers = json.loads((folder / "run.json").read_text())["segments"][0]["environment"]["workers"]
    assert workers["xla"]["jax"] and workers["torch"]["torch"] and workers["target"]["triton"]
    assert workers["target"]["pretends"] == "NVIDIA H200"


def test_a_stop_is_no_traceback_and_leaves_nothing_behind(tmp_path: Path) -> None:
    """Other tests run at the same time, so the run has a temporary folder of its own. In memory, an ended run's scratch
    folder has a lock that no process holds."""
    def abandoned() -> set[Path]:
        found = set()
        for folder in (host.scratch_root() or temporary).glob("xlafuse-*"):
            with contextlib.suppress(OSError), (folder / "lock").open("rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                found.add(folder)
        return found

    temporary = tmp_path / "temporary"
    temporary.mkdir()
    before = abandoned()
    run = subprocess.Popen(
        [sys.executable, "-m", "xlafuse", "run", "softmax", "--target", "h200", "--out", str(tmp_path / "run")],
        cwd=PROJECT, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "TMPDIR": str(temporary)},
    )
    deadline = time.monotonic() + 60
    while not list((tmp_path / "run" / "logs").glob("*.log")):  # then a worker has started
        assert run.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    run.send_signal(signal.SIGTERM)
    _, said = run.communicate(timeout=60)
    assert run.returncode == 130, said
    assert "Traceback" not in said and "--resume goes on" in said
    time.sleep(1)
    assert abandoned() <= before
    assert not list(temporary.glob("xlafuse-*"))


def test_archives_hold_what_each_compiler_said(folder: Path) -> None:
    def names(implementation: str) -> set[str]:
        packed = RunFile(folder, f"dumps/softmax-4096-columns-fp32-train-{implementation}.zip").read_bytes()
        with zipfile.ZipFile(io.BytesIO(packed)) as archive:
            return {Path(name).name for name in archive.namelist()}

    xla = names("xla")
    assert {"stablehlo.mlir", "optimized.hlo.txt", "optimized.hlo.pb"} <= xla, xla
    assert any("priority" in name for name in xla), xla
    inductor = names("inductor")
    assert {"fx_graph.py", "ir_pre_fusion.txt", "ir_post_fusion.txt", "output_code.py", "resources.json"} <= inductor
    for implementation in ("inductor", "triton"):
        suffixes = {Path(name).suffix for name in names(implementation)}
        assert {".ttir", ".ttgir", ".ptx", ".sass"} <= suffixes
    assert {".cu", ".ptx", ".sass"} <= {Path(name).suffix for name in names("cuda")}


@pytest.mark.parametrize("implementation", ["xla", "inductor", "triton", "cuda"])
def test_kernels_have_the_launches_that_compilers_state(folder: Path, implementation: str) -> None:
    """XLA states no registers, which only its assembler's output has."""
    graph = store.load(RunFile(folder, f"graphs/softmax-4096-columns-fp32-train-{implementation}.json.gz"))
    assert graph.kernels
    for kernel in graph.kernels:
        launch = kernel.launch
        assert launch.grid and launch.grid[0] > 1 and launch.block and launch.block[0] % 32 == 0, kernel
        assert launch.shared_bytes is not None and launch.differing is None
        assert (launch.registers is None) == (launch.local_bytes is None) == (implementation == "xla")
        assert (launch.config or {}).get("num_warps") == launch.block[0] // 32 or implementation == "xla"
        assert all(access.strides for access in (*(kernel.inputs or ()), *(kernel.outputs or ())))
    if implementation == "inductor":  # the archive of the capture tells the same
        packed = RunFile(folder, f"dumps/softmax-4096-columns-fp32-train-{implementation}.zip").read_bytes()
        archive = folder.parent / "inductor.zip"
        archive.write_bytes(packed)
        again = from_inductor(dump.read(archive)).kernels or ()
        assert [kernel.launch for kernel in again] == [kernel.launch for kernel in graph.kernels]


def test_a_finished_run_resumes_with_nothing_to_do(folder: Path) -> None:
    before = [(folder / name).read_bytes() for name in ("records.jsonl", "run.json")]
    done = xlafuse("run", "--out", folder, "--resume")
    assert done.exit_code == 0 and "already has every record" in done.stderr
    assert [(folder / name).read_bytes() for name in ("records.jsonl", "run.json")] == before


@pytest.mark.full
def test_an_interrupted_run_keeps_its_records_and_goes_on(folder: Path, tmp_path: Path) -> None:
    lines = (folder / "records.jsonl").read_text().splitlines()
    (tmp_path / "logs").mkdir()
    (tmp_path / "run.json").write_text((folder / "run.json").read_text())
    kept = [line for line in lines if json.loads(line)["implementation"] != "cuda"]
    (tmp_path / "records.jsonl").write_text("\n".join(kept) + '\n{"id": "softmax/torn')
    done = xlafuse_process("run", "--out", str(tmp_path), "--resume")
    assert done.returncode == 0, done.stderr
    rows = rows_of(tmp_path)
    assert {r["implementation"]: r["status"] for r in rows}["cuda"] == "compiled" and len(rows) == len(lines)


@pytest.mark.skipif(host.gpu_present(), reason="a machine with a GPU runs on it by default")
def test_the_default_target_is_the_h200(folder: Path) -> None:
    assert json.loads((folder / "run.json").read_text())["target"] == "h200"
