"""PyTorch's launches inside a JAX function: what is planned, and that arrays go where the plan says.

The same workers compile programs of outputs and gradients, whose graphs have one phase.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from full_marks import first_of_each, full

from xlafuse.compare.base.paths import PROJECT
from xlafuse.compare.graph import store
from xlafuse.compare.spec.blocks import BLOCKS
from xlafuse.compare.spec.case import Case
from xlafuse.compare.workers.client import Worker, WorkerError
from xlafuse.compile.environment import find_cuda_tools

# A kernel that doubles, and one of a backward pass that reads an input, a result and the cotangent.
DOUBLE = {"name": "double", "reads": [0], "writes": [[1, [3], "float32"]]}
SAVING = {"name": "double_and_square", "reads": [0], "writes": [[1, [3], "float32"], [2, [3], "float32"]]}
GRADIENT = {"name": "gradient", "reads": [0, 2, 3], "writes": [[4, [3], "float32"]]}
DECLARED = {"flops": 3.0, "operations": [{"op": "mul"}]}
LAUNCH: dict[str, Any] = {"ir": "", "grid": [1, 1, 1], "num_warps": 4, "num_stages": 3, "declared": DECLARED}
PLANS = {
    "false": {"parts": {"forward": [DOUBLE | LAUNCH]}, "inputs": {"x": 0}, "outputs": {"y": 1}},
    "true": {
        "parts": {"forward": [SAVING | LAUNCH], "backward": [GRADIENT | LAUNCH]},
        "inputs": {"x": 0, "dy": 3}, "outputs": {"y": 1, "dx": 4},
    },
}
WIRING = """
import json, sys
import jax, jax.numpy as jnp
from xlafuse.compare.workers.xla import triton_calls

plans, called = json.loads(sys.argv[1]), []
kernels = {
    "double": lambda x: [2 * x],
    "double_and_square": lambda x: [2 * x, x * x],
    "gradient": lambda x, squared, dy: [1000 * x + 100 * squared + dy],
}

def ffi_call(target, results):
    def call(*operands, name, **attributes):
        called.append([target, name, sorted(attributes), [r.shape for r in results]])
        return kernels[name](*operands)
    return call

jax.ffi.ffi_call = ffi_call
triton_calls._plan = lambda function, specs, attributes, precision, *, train: plans[json.dumps(train)]
apply = triton_calls.launching("anywhere:apply")
x = jnp.asarray([1.0, 2.0, 3.0])
y = apply({"x": x})["y"]
outputs, vjp = jax.vjp(apply, {"x": x})
(gradients,) = vjp({"y": jnp.asarray([0.5, 0.25, 0.125])})
assert not {"torch", "triton"} & set(sys.modules)
print(json.dumps([y.tolist(), outputs["y"].tolist(), gradients["x"].tolist(), called]))
"""


def test_arrays_go_where_the_plan_says() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WIRING, json.dumps(PLANS)], cwd=PROJECT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-3000:]
    y, again, gradient, called = json.loads(done.stdout)
    assert y == again == [2.0, 4.0, 6.0]
    assert gradient == [1000 + 100 + 0.5, 2000 + 400 + 0.25, 3000 + 900 + 0.125]
    assert [name for _, name, _, _ in called] == ["double", "double_and_square", "gradient"]
    for target, _, attributes, _ in called:
        assert target == "__gpu$xla.gpu.triton"
        assert attributes == ["debug", "grid_x", "grid_y", "grid_z", "ir", "num_stages", "num_warps"]


@pytest.fixture(scope="module")
def planner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    if shutil.which("g++") is None:
        pytest.skip("pretending to have a GPU needs g++")
    environment = {"XLAFUSE_TARGET": "h200", "CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "0"}
    worker = Worker("target", Path(tmp_path_factory.mktemp("planner")) / "log", environment)
    worker.wait_ready()
    yield worker
    worker.stop()


def plan(planner: Worker, function: str, train: bool, attributes: dict[str, Any], **inputs: list[int]) -> Any:
    return planner.ask(
        "launch_plan", function=function, inputs={name: [shape, "bfloat16"] for name, shape in inputs.items()},
        attributes=attributes, train=train, precision="ieee",
    )


@pytest.mark.slow
def test_the_plan_is_what_pytorch_launches(planner: Worker) -> None:
    from xlafuse.triton_side.calls.effects import of_ttir

    found = plan(planner, "xlafuse.triton_side.kernels.rmsnorm:apply", True, {"eps": 1e-5}, x=[64, 96], weight=[96])
    assert set(found["inputs"]) == {"x", "weight", "dy"} and set(found["outputs"]) == {"y", "dx", "dweight"}
    launches = [launch for part in ("forward", "backward") for launch in found["parts"][part]]
    assert [launch["name"] for launch in launches] == [
        "rmsnorm_forward_kernel", "rmsnorm_backward_kernel", "sum_columns_kernel"
    ]
    there = set(found["inputs"].values())
    for launch in launches:
        assert set(launch["reads"]) <= there
        there |= {number for number, _, _ in launch["writes"]}
        effects = of_ttir(launch["ir"], launch["name"])
        operands, results = len(launch["reads"]), len(launch["writes"])
        assert effects.reads == set(range(operands))
        assert effects.writes == set(range(operands, operands + results))
    assert set(found["outputs"].values()) <= there


@pytest.fixture(scope="module")
def xla(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    pytest.importorskip("jax")
    if importlib.util.find_spec("jax_plugins.xla_cuda13") is None or find_cuda_tools() is None:
        pytest.skip("compiling for a GPU needs the jax-cuda13-pjrt package, ptxas and libdevice.10.bc")
    environment = {
        "XLAFUSE_TARGET": "h200", "CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu", "TRITON_INTERPRET": "0"
    }
    worker = Worker("xla", Path(tmp_path_factory.mktemp("xla")) / "log", environment)
    worker.wait_ready()
    yield worker
    worker.stop()


def _hand_written(compiled: dict[str, Any]) -> dict[tuple[str, str | None], Any]:
    kernels = store.from_json(compiled["graph"]).kernels or ()
    written = [kernel for kernel in kernels if kernel.kind == "custom"]
    found = {(k.phase, k.runtime_name): (k.flops, k.source_ops) for k in written}
    assert len(found) == len(written)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("direction", first_of_each(["train", "fwd"]))
@pytest.mark.parametrize(
    "block", [
        full(block.name) if block.name in ("attention", "swiglu") else block.name for block in BLOCKS.values()
        if any(implementation.backend_name == "xla-triton" for implementation in block.implementations)
    ],
)
def test_a_kernel_computes_what_it_does_as_pytorch_launches_it(
    planner: Worker, xla: Worker, block: str, direction: str, tmp_path: Path
) -> None:
    cases = [c for c in BLOCKS[block].cases("quick") if c.direction == direction]
    # PyTorch launches Gluon kernels of attention in 16 bits. XLA cannot compile them.
    case = next(c for c in cases if block != "attention" or c.dtype == "float32")
    compile_ = {"case": case.to_json(), "dumps": str(tmp_path / "xla")}
    called = _hand_written(xla.ask("compile", implementation="xla+triton", target="h200", **compile_))
    compile_["dumps"] = str(tmp_path / "triton")
    assert called == _hand_written(planner.ask("compile", implementation="triton", **compile_))
    assert all(flops and operations for flops, operations in called.values())


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["xla", full("inductor"), "triton"])
def test_the_graph_of_a_joint_program_has_one_phase(
    planner: Worker, xla: Worker, tmp_path: Path, implementation: str
) -> None:
    case = Case("softmax", "odd", {"rows": 4096, "columns": 1024}, "float32", "joint")
    worker, target = (xla, {"target": "h200"}) if implementation == "xla" else (planner, {})
    compiled = worker.ask(
        "compile", case=case.to_json(), implementation=implementation, dumps=str(tmp_path), **target
    )
    graph = store.from_json(compiled["graph"])
    assert graph.kernels and {kernel.phase for kernel in graph.kernels} == {"forward"}
    operations = [op for kernel in graph.kernels for op in kernel.source_ops]
    assert any(op.backward for op in operations) and not all(op.backward for op in operations)
    assert not graph.saved
    assert {"exp", "divide"} <= {op.stage for op in operations}


@pytest.mark.slow
def test_tiles_come_through_pointers(planner: Worker) -> None:
    shape = [1, 1, 256, 128]
    found = plan(planner, "xlafuse.triton_side.kernels.attention:apply", False, {}, q=shape, k=shape, v=shape)
    (launch,) = found["parts"]["forward"]
    assert "tt.load" in launch["ir"] and "tensor_descriptor" not in launch["ir"]


@pytest.mark.slow
def test_what_is_more_than_launches_is_refused(planner: Worker) -> None:
    with pytest.raises(WorkerError, match="does more than launch Triton kernels: among the launches PyTorch runs aten"):
        plan(planner, "xlafuse.triton_side.library.softmax:apply", False, {}, x=[8, 8])
