"""Outputs and gradients in one program: right in every framework, with one phase in the graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from full_marks import full

from xlafuse.compare.graph import store
from xlafuse.compare.graph.model import FusionGraph
from xlafuse.compare.run.for_target import environment
from xlafuse.compare.spec.blocks import BLOCKS
from xlafuse.compare.spec.case import Case
from xlafuse.compare.workers.pool import WorkerPool

Check = Callable[[Case, str, str], dict[str, Any]]
JOINT = Case("softmax", "odd", {"rows": 7, "columns": 257}, "float32", "joint")


def test_a_joint_program_counts_shared_bytes_and_flops_once() -> None:
    block, elements = BLOCKS["softmax"], 4 * 7 * 257
    train = replace(JOINT, direction="train")
    # x and dy are read, y and dx are written; apart, backward would read y again
    assert block.compulsory_traffic(JOINT) == {"forward": (2 * elements, 2 * elements)}
    assert sum(block.bytes_compulsory(train).values()) == 5 * elements
    assert block.phase_flops(JOINT) == {"forward": sum(block.phase_flops(train).values())}


@pytest.mark.parametrize("implementation", ["xla", "eager", "library", full("inductor"), "triton"])
def test_outputs_and_gradients_are_right(check_on_cpu: Check, implementation: str) -> None:
    worker = BLOCKS["softmax"].implementation(implementation).backend.cpu_check_worker
    outcome = check_on_cpu(JOINT, implementation, worker)
    assert {e["name"] for e in outcome["errors"]} == {"y", "d_x"}
    assert all(e["error"] <= e["tolerance"] for e in outcome["errors"])


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerPool]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("TRITON_INTERPRET", raising=False)  # a worker that compiles for a target must not interpret
        pool = WorkerPool(tmp_path_factory.mktemp("joint"), environment("h200"))
        yield pool
        pool.stop()


def compiled(pool: WorkerPool, folder: str, implementation: str) -> FusionGraph:
    case = replace(JOINT, sizes={"rows": 4096, "columns": 1024})
    role, target = ("xla", {"target": "h200"}) if implementation == "xla" else ("target", {})
    dumps = f"{folder}/{implementation}"
    found = pool.ask(role, "compile", case=case.to_json(), implementation=implementation, dumps=dumps, **target)
    return store.from_json(found["graph"])


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["xla", full("inductor"), "triton"])
def test_the_graph_has_one_phase(pool: WorkerPool, tmp_path: Any, implementation: str) -> None:
    graph = compiled(pool, str(tmp_path), implementation)
    assert graph.kernels and {kernel.phase for kernel in graph.kernels} == {"forward"}
    operations = [op for kernel in graph.kernels for op in kernel.source_ops]
    assert any(op.backward for op in operations) and not all(op.backward for op in operations)
    assert not graph.saved
    assert {"exp", "divide"} <= {op.stage for op in operations}
