"""PyTorch's side for a GPU that is not there: Inductor, Triton and CUDA emit its real code; nothing is run.

The process pretends to have the GPU and is good for nothing else, which is why it is a role of its own.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from triton_side.deviceless import for_target

from ... import targets
from ...base import host
from ...base.worker_protocol import Skip
from ...spec.case import Case
from ...spec.implementation import load

_PACK = targets.load(os.environ["XLAFUSE_TARGET"])
try:
    for_target.activate(_PACK.device_properties())
except for_target.Unsupported as problem:
    raise Skip(str(problem)) from problem

import torch  # noqa: E402  (the pretended GPU must be there before torch is imported)

from triton_side.calls import dispatch, launch_plan  # noqa: E402
from triton_side.kernels._tiles import without_descriptors  # noqa: E402

from ...graph import store  # noqa: E402
from ...graph.analyse.summary import portable_lines  # noqa: E402
from ...graph.build.from_eager import from_eager  # noqa: E402
from ...graph.build.from_inductor import from_inductor  # noqa: E402
from ...graph.build.from_launches import from_launches  # noqa: E402
from ...graph.build.phases import as_one_phase  # noqa: E402
from ...spec.blocks import BLOCKS  # noqa: E402
from ..service import require  # noqa: E402


def methods() -> dict[str, Callable[..., Any]]:
    return {"compile": compile_for_target, "environment": environment, "launch_plan": plan_launches}


def environment() -> dict[str, Any]:
    """Versions of what emits the code, and the GPU that this process pretends to have."""
    packages = ("torch", "triton", "cuda-core", "cuda-bindings", "nvidia-cuda-nvrtc")
    found = {"python": platform.python_version(), "pretends": str(_PACK.device_properties()["name"])}
    return found | host.versions(packages)


def compile_for_target(case: dict[str, Any], implementation: str, dumps: str) -> dict[str, Any]:
    """Fusion graph, artifacts and compile time of one implementation for this process's pretended GPU."""
    spec = Case.from_json(case)
    block = BLOCKS[spec.block]
    row = block.implementation(implementation)
    require(row)
    torch.set_float32_matmul_precision("high" if spec.precision == "tf32" else "highest")
    inputs = {t.name: (t.shape(spec.sizes), getattr(torch, t.dtype_in(spec))) for t in block.inputs}
    train = spec.differentiates
    about: dict[str, Any] = {"target": os.environ["XLAFUSE_TARGET"], "versions": host.installed("torch", "triton")}
    started = time.perf_counter()
    if row.compiler.startswith("inductor"):
        captured = for_target.compile_inductor(
            row.load(), inputs, block.attributes_of(spec), train=train, max_autotune=row.compiler == "inductor-max"
        )
        compile_s = time.perf_counter() - started
        captured.write(dumps)
        graph = from_inductor(captured, **about)
    else:
        recorded = for_target.record_call(row.load(), inputs, block.attributes_of(spec), train=train)
        compile_s = time.perf_counter() - started
        if row.compiler == "eager":
            graph = from_eager(recorded, name=row.name, **about)
        else:
            dispatch.write_launches(recorded, Path(dumps))
            graph = from_launches(recorded, name=row.name, compiler=row.compiler, **about)
    if spec.direction == "joint":
        graph = as_one_phase(graph)
    return {"compile_s": compile_s, "graph": store.to_json(portable_lines(replace(graph, name=row.name)))}


def plan_launches(
    function: str, inputs: dict[str, list[Any]], attributes: dict[str, Any], train: bool, precision: str
) -> dict[str, Any]:
    """What `function` ("package.module:name") launches, of Triton kernels alone, on inputs of name: [shape, dtype]: a
    launch_plan whose launches have "declared", the FLOPs and operations that the graph of these launches has."""
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    specs: dict[str, for_target.Spec] = {name: (tuple(shape), dtype) for name, (shape, dtype) in inputs.items()}
    with without_descriptors():
        recorded = for_target.record_call(load(function), specs, attributes, train=train)
    try:
        plan = launch_plan.of(recorded)
    except launch_plan.NotPlain as problem:
        raise Skip(f"{function} is not launches of Triton kernels alone: {problem}") from problem
    kernels = portable_lines(from_launches(recorded, name=function, compiler="triton")).kernels or ()
    launches = [launch for part in plan["parts"].values() for launch in part]
    for launch, kernel in zip(launches, kernels, strict=True):
        launch["declared"] = {"flops": kernel.flops, "operations": [asdict(op) for op in kernel.source_ops]}
    return plan
