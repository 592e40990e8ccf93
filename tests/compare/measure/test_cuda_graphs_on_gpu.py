"""Implementations that replay CUDA graphs, through real workers: checks, memory, launches, modes and refusals."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
from msgspec import convert
from worker_programs import WorkerProgram

from xlafuse.compare.base.paths import PROJECT
from xlafuse.compare.graph import store
from xlafuse.compare.graph.join.kernel_records import join
from xlafuse.compare.measure.clock import DeviceRecord, cupti_missing
from xlafuse.compare.numerics import reference
from xlafuse.compare.spec.blocks import BLOCKS
from xlafuse.compare.spec.case import Case
from xlafuse.compare.workers.client import WorkerError
from xlafuse.compare.workers.pool import WorkerPool

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(cupti_missing() is not None, reason=str(cupti_missing()))]

CASES = {
    (block, direction): next(c for c in BLOCKS[block].cpu_check_cases() if c.direction == direction)
    for block, direction in (("rmsnorm", "fwd"), ("rmsnorm", "train"), ("cross_entropy", "joint"))
}


@pytest.mark.parametrize("plain", ["triton", "inductor"])
@pytest.mark.parametrize(("block", "direction"), CASES)
def test_graphs_replay_the_kernels_of_the_plain_call(
    pool: WorkerPool, tmp_path: Path, block: str, direction: str, plain: str
) -> None:
    case = CASES[block, direction]
    launched = WorkerProgram(pool, tmp_path, case, plain)
    launched.ask("check")
    launches = {phase: found["launches"] for phase, found in launched.measure()["phases"].items()}
    replayed = WorkerProgram(pool, tmp_path, case, f"{plain}-cudagraphs")
    assert all(error["error"] <= error["tolerance"] for error in replayed.ask("check")["errors"])

    buffers, inputs = replayed.prepared["command_buffers"], replayed.prepared["cuda_graph"]
    assert {phase: inside for phase, (inside, _) in buffers.items()} == launches
    gradients = {f"d_{t.name}" for t in BLOCKS[block].outputs if case.differentiates}
    assert {*inputs["static"], *inputs["copied"]} == {t.name for t in BLOCKS[block].inputs} | gradients
    activations = {"rmsnorm": {"x"}, "cross_entropy": {"logits", "labels"}}[block]
    assert {*inputs["copied"]} == (set() if plain == "triton" else activations | gradients)

    graph = store.from_json(replayed.prepared["graph"])
    for input_set in (0, 1):  # a graph that reads the first set's inputs would be wrong for the second
        found = replayed.measure(input_set, first=input_set == 0)
        for phase in case.phases:
            timed, (inside, every) = found["phases"][phase], buffers[phase]
            assert timed["poisoned"] and timed["launches"] == every
            _, left = join(graph, {phase: [convert(record, DeviceRecord) for record in timed["records"]]})
            assert len(left) == every - inside  # the copies of inputs
            if input_set == 0:
                assert found["peak_memory"][phase]["bytes"] > 0
    assert replayed.measure_mode("graph") == {"same_as": "cold"}
    with pytest.raises(WorkerError) as refused:
        replayed.measure_mode("no-graph")
    assert refused.value.kind == "skipped"
    for program in (launched, replayed):
        program.ask("release")


def _faulty() -> Any:
    if "faulty" not in sys.modules:
        spec = importlib.util.spec_from_file_location("faulty", PROJECT / "tests/compare/workers/faulty.py")
        assert spec and spec.loader
        sys.modules["faulty"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["faulty"])
    return sys.modules["faulty"]


@pytest.mark.parametrize(("function", "wrong"), [("right", []), ("unwritten_element", ["y"]), ("cached_result", ["y"])])
def test_a_captured_call_is_checked_as_any_other(tmp_path: Path, function: str, wrong: list[str]) -> None:
    """An element that no kernel of the graph writes is NaN, also in the memory that only the graph has."""
    from xlafuse.compare.measure.measurement import MeasuredProgram
    from xlafuse.compare.workers.pytorch import cuda_graphs, prepare
    from xlafuse.compare.workers.pytorch.worker import TorchBackend

    backend = TorchBackend()
    case = Case("softmax", "odd", {"rows": 7, "columns": 257}, "float32", "fwd")
    folders = [tmp_path / "0", tmp_path / "1"]
    scales = [reference.produce(case, seed, path) for seed, path in enumerate(folders)]
    plain = prepare.program_of(case, getattr(_faulty(), function))
    program = cuda_graphs.capture(plain, backend.inputs(folders[0], case), {}, None)
    checks = MeasuredProgram(backend, program, case, folders, scales).check()
    assert [check.name for check in checks if not check.passes] == wrong


def test_a_call_that_inductor_does_not_replay_is_skipped() -> None:
    import torch

    from xlafuse.compare.base.worker_protocol import Skip
    from xlafuse.compare.measure.worker_backend import Program
    from xlafuse.compare.workers.pytorch import inductor_graphs
    from xlafuse.compare.workers.pytorch.worker import TorchBackend
    from xlafuse.triton_side.inductor import compiler

    def adds_in_place(inputs: dict[str, Any]) -> dict[str, Any]:
        return {"y": inputs["x"].add_(1) * 2}

    compiled = compiler.compile(adds_in_place, mode="reduce-overhead")
    forward = inductor_graphs.beginning_a_step(lambda inputs: (compiled(inputs), None))
    inputs = {"x": torch.ones(8, device="cuda")}
    with compiler.cuda_graph_skips() as skips:
        forward(inputs)
        with pytest.raises(Skip, match="not replayed as CUDA graphs: .*mutated inputs"):
            inductor_graphs.replayed(TorchBackend(), Program(forward, None, 0.0, None), (), inputs, {}, skips)


def _program(apply: Any, *, trains: bool) -> Any:
    from xlafuse.compare.workers.pytorch import prepare

    return prepare.program_of(Case("softmax", "odd", {}, "bfloat16", "train" if trains else "fwd"), apply)


def test_a_graph_keeps_the_workspace_of_its_products() -> None:
    """Inductor frees the workspaces of cuBLAS when it captures; a split product of a captured call still needs one."""
    import torch

    from xlafuse.compare.workers.pytorch import cuda_graphs

    inputs = {"x": torch.randn(64, 1 << 16, device="cuda", dtype=torch.bfloat16)}
    program = cuda_graphs.capture(_program(lambda a: {"y": a["x"] @ a["x"].mT}, trains=False), inputs, {}, None)
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    found = program.forward(inputs)[0]["y"].clone()
    torch.cuda.synchronize()
    assert torch.equal(found, inputs["x"] @ inputs["x"].mT)


def test_a_call_is_captured_while_an_earlier_gradient_of_its_inputs_lives() -> None:
    import torch

    from xlafuse.compare.workers.pytorch import cuda_graphs

    def apply(arrays: Any) -> Any:
        return {"y": arrays["x"].exp(), "z": arrays["x"] * 2}

    inputs = {"x": torch.randn(8, device="cuda", requires_grad=True)}
    cotangents = {name: torch.ones(8, device="cuda") for name in "yz"}
    alive = apply(inputs)
    program = cuda_graphs.capture(_program(apply, trains=True), inputs, cotangents, None)
    gradient = program.backward(program.forward(inputs)[1], cotangents)["x"]
    assert torch.allclose(gradient, alive["y"].detach() + 2)
