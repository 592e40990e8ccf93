"""The modes of timing on a GPU, through real workers: results checked against the reference in each of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from worker_programs import WorkerProgram

from xlafuse.compare.base.paths import PROJECT
from xlafuse.compare.measure.clock import cupti_missing
from xlafuse.compare.spec.blocks import BLOCKS
from xlafuse.compare.workers.pool import WorkerPool

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(cupti_missing() is not None, reason=str(cupti_missing()))]

CASES = {
    (block, direction): next(c for c in BLOCKS[block].cpu_check_cases() if c.direction == direction)
    for block, direction in (("vector_add", "fwd"), ("softmax", "fwd"), ("softmax", "train"))
}


@pytest.mark.parametrize("implementation", ["eager", "library", "inductor", "triton", "cuda"])
@pytest.mark.parametrize(("block", "direction"), CASES)
def test_a_graph_replays_all_launches(
    pool: WorkerPool, tmp_path: Path, block: str, direction: str, implementation: str
) -> None:
    case = CASES[block, direction]
    with WorkerProgram(pool, tmp_path, case, implementation) as program:
        for input_set in (0, 1):  # a replay that reads the first set's inputs would be wrong for the second
            main = program.measure(input_set)
            graph, warm = (program.measure_mode(mode, input_set) for mode in ("graph", "warm"))
            for phase in case.phases:
                launches = main["phases"][phase]["launches"]
                assert warm["phases"][phase]["launches"] == launches
                assert graph["phases"][phase]["launches"] == launches
                assert graph["phases"][phase]["poisoned"] and min(graph["phases"][phase]["device_time"]) > 0
        assert program.measure_mode("no-graph") == {"same_as": "cold"}
        by_triton = program.measure_mode("triton-launch")
        assert ("phases" in by_triton) == (implementation == "triton")
        for phase in case.phases if "phases" in by_triton else ():
            assert by_triton["phases"][phase]["launches"] == main["phases"][phase]["launches"]


@pytest.mark.parametrize("implementation", ["xla", "xla-unfused"])
@pytest.mark.parametrize(("block", "direction"), CASES)
def test_command_buffers_replay_all_launches(
    pool: WorkerPool, tmp_path: Path, block: str, direction: str, implementation: str
) -> None:
    case = CASES[block, direction]
    with WorkerProgram(pool, tmp_path, case, implementation) as program:
        buffers = program.prepared["command_buffers"]
        main = program.measure(1)
        graph, no_graph, warm = (program.measure_mode(mode, 1) for mode in ("graph", "no-graph", "warm"))
    assert set(buffers) == set(case.phases)
    if all(inside == total for inside, total in buffers.values()):
        assert graph == {"same_as": "cold"}
    else:
        assert all(inside for inside, _ in graph["command_buffers"].values())
    if any(inside for inside, _ in buffers.values()):
        assert not any(inside for inside, _ in no_graph["command_buffers"].values())
    else:
        assert no_graph == {"same_as": "cold"}
    for found in (graph, no_graph, warm):
        for phase in case.phases if "phases" in found else ():
            assert found["phases"][phase]["launches"] == main["phases"][phase]["launches"]


_WAITS = """
import torch
from xlafuse.compare.measure.worker_backend import Program
from xlafuse.compare.workers.pytorch.worker import TorchBackend
from xlafuse.compare.workers.pytorch.cuda_graphs import CaptureFailed

def waits(inputs):
    return {"y": inputs["x"] * float(inputs["x"].sum())}, None

backend = TorchBackend()
assert backend.device_works()
try:
    with backend.in_mode(Program(waits, None, 0.0, None), "graph", {"x": torch.ones(8, device="cuda")}, {}):
        pass
except CaptureFailed as problem:
    print(problem)
assert not backend.device_works()
"""


def test_a_call_that_waits_for_the_device_cannot_be_captured() -> None:
    """In a process of its own, for a failed capture is the end of one."""
    done = subprocess.run([sys.executable, "-c", _WAITS], cwd=PROJECT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "no CUDA graph could be captured" in done.stdout
