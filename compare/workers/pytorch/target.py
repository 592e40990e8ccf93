"""The PyTorch worker for a GPU that is not there: Inductor, Triton and CUDA emit its real code, and nothing runs.

The process pretends to have that GPU, so it has a role of its own and serves nothing else.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from xlafuse.triton_side.deviceless import for_target

from ... import targets
from ...base import host
from ...base.worker_protocol import Skip
from ...spec.case import Case
from ...spec.implementation import Implementation, load

_TARGET = os.environ["XLAFUSE_TARGET"]
# XLA's worker on a GPU passes that GPU's properties, so that its launches are planned without a pack.
_GIVEN = os.environ.get("XLAFUSE_TARGET_PROPERTIES")
_PROPERTIES = json.loads(_GIVEN) if _GIVEN else targets.load(_TARGET).device_properties()
try:
    for_target.activate(_PROPERTIES)
except for_target.Unsupported as problem:
    raise Skip(str(problem)) from problem

import torch  # noqa: E402  (the GPU must be pretended before torch is imported)

from xlafuse.triton_side.calls import dispatch, launch_plan  # noqa: E402
from xlafuse.triton_side.calls.launches import Launch  # noqa: E402
from xlafuse.triton_side.kernels import hopper  # noqa: E402
from xlafuse.triton_side.kernels.shared.tiles import without_descriptors  # noqa: E402
from xlafuse.triton_side.parallel import symmetric_memory  # noqa: E402
from xlafuse.triton_side.parallel.ranks import Ranks  # noqa: E402

from ...graph import store  # noqa: E402
from ...graph.analyse.exchange import between  # noqa: E402
from ...graph.analyse.summary import portable_lines  # noqa: E402
from ...graph.build.from_eager import from_eager  # noqa: E402
from ...graph.build.from_inductor import from_inductor  # noqa: E402
from ...graph.build.from_launches import from_launches  # noqa: E402
from ...graph.build.phases import as_one_phase  # noqa: E402
from ...graph.model import FusionGraph  # noqa: E402
from ...spec.blocks import BLOCKS  # noqa: E402
from ..service import Requested, requested  # noqa: E402
from .worker import launch_table  # noqa: E402

HOPPER = Path(hopper.__file__).parent


def methods() -> dict[str, Callable[..., Any]]:
    return {"compile": compile_for_target, "environment": environment, "launch_plan": plan_launches}


def environment() -> dict[str, Any]:
    """Return the versions of the packages that emit code, the GPU that this process pretends to have, and its table."""
    packages = ("torch", "triton", "cuda-core", "cuda-bindings", "nvidia-cuda-nvrtc")
    found = {"python": platform.python_version(), "pretends": str(_PROPERTIES["name"])}
    return found | {"launch_table": launch_table()} | host.versions(packages)


def compile_for_target(case: dict[str, Any], implementation: Requested, dumps: str) -> dict[str, Any]:
    """Compile one implementation for the pretended GPU: {"compile_s", "graph"}. Artifacts go to `dumps`."""
    spec, row = requested(case, implementation)
    torch.set_float32_matmul_precision("high" if spec.precision == "tf32" else "highest")
    assert row.backend.compile_for_target is not None, "its target worker is this one"
    compile_s, graph = load(row.backend.compile_for_target)(spec, row, Path(dumps))
    if spec.direction == "joint":
        graph = as_one_phase(graph)
    return {"compile_s": compile_s, "graph": store.to_json(portable_lines(replace(graph, name=row.name)))}


def inductor(case: Case, implementation: Implementation, dumps: Path) -> tuple[float, FusionGraph]:
    """Return the compile time in seconds and the graph of Inductor's output."""
    started = time.perf_counter()
    captured = for_target.compile_inductor(
        implementation.load(), _inputs(case), BLOCKS[case.block].attributes_of(case), train=case.differentiates,
        max_autotune=implementation.backend.autotunes_for_minutes,
    )
    compile_s = time.perf_counter() - started
    captured.write(dumps)
    return compile_s, from_inductor(captured, target=_TARGET, versions=_versions())


def inductor_ranks(case: Case, implementation: Implementation, dumps: Path) -> tuple[float, FusionGraph]:
    """Return the compile time in seconds and the graph of Inductor's output for one of the case's GPUs."""
    ranks = Ranks(0, case.ranks, symmetric_memory.group_without_peers(case.ranks))
    started = time.perf_counter()
    captured = for_target.compile_inductor(
        implementation.load(), _inputs(case), {"ranks": ranks, **BLOCKS[case.block].attributes_of(case)},
        train=case.differentiates, max_autotune=False,
    )
    compile_s = time.perf_counter() - started
    captured.write(dumps)
    return compile_s, between(from_inductor(captured, target=_TARGET, versions=_versions()), case.ranks)


def eager(case: Case, implementation: Implementation, dumps: Path) -> tuple[float, FusionGraph]:
    """Return the time in seconds and the graph of the recorded operations, which have no kernels here."""
    recorded, compile_s = _record(case, implementation)
    return compile_s, from_eager(recorded, name=implementation.name, target=_TARGET, versions=_versions())


def kernels(case: Case, implementation: Implementation, dumps: Path) -> tuple[float, FusionGraph]:
    """Return the compile time in seconds and the graph of the recorded launches of hand-written kernels."""
    recorded, compile_s = _record(case, implementation)
    dispatch.write_launches(recorded, dumps)
    graph = from_launches(
        recorded, name=implementation.name, compiler=implementation.backend.name, target=_TARGET, versions=_versions()
    )
    return compile_s, replace(graph, notes=(*graph.notes, *_portable(recorded)))


def _portable(recorded: dispatch.Recorded) -> list[str]:
    """Return a note where portable kernels stand in for those in Gluon, which only Hopper GPUs run."""
    files = {launch.source for part in recorded.parts.values() for launch in part if isinstance(launch, Launch)}
    alike = any(file.parent == HOPPER.parent and [*HOPPER.glob(f"{file.stem}*.py")] for file in files)
    if not alike or (_PROPERTIES["major"], _PROPERTIES["minor"]) == (9, 0):
        return []
    return [f"portable Triton kernels: those in Gluon use Hopper's instructions, which the {_TARGET} lacks"]


def _record(case: Case, implementation: Implementation) -> tuple[dispatch.Recorded, float]:
    started = time.perf_counter()
    recorded = for_target.record_call(
        implementation.load(), _inputs(case), BLOCKS[case.block].attributes_of(case), train=case.differentiates
    )
    return recorded, time.perf_counter() - started


def _inputs(case: Case) -> dict[str, for_target.Spec]:
    """Return each input's shape, or that of one GPU's slice, and dtype."""
    inputs = BLOCKS[case.block].inputs
    return {t.name: (t.rank_shape(case.sizes, case.ranks), getattr(torch, t.dtype_in(case))) for t in inputs}


def _versions() -> dict[str, str]:
    return host.installed("torch", "triton")


def plan_launches(
    function: str, inputs: dict[str, list[Any]], attributes: dict[str, Any], train: bool, precision: str
) -> dict[str, Any]:
    """Return the launch plan of a function that launches Triton kernels only (xlafuse.triton_side.calls.launch_plan).

    function: "package.module:name". inputs: name -> [shape, dtype]. Each launch of the plan also has "declared", the
    FLOPs and operations of its kernel in the graph. Raises Skip for a function that does more than such launches.
    """
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    specs: dict[str, for_target.Spec] = {name: (tuple(shape), dtype) for name, (shape, dtype) in inputs.items()}
    with without_descriptors():
        recorded = for_target.record_call(load(function), specs, attributes, train=train)
    try:
        plan = launch_plan.of(recorded)
    except launch_plan.NotPlain as problem:
        raise Skip(f"{function} does more than launch Triton kernels: {problem}") from problem
    kernels = portable_lines(from_launches(recorded, name=function, compiler="triton")).kernels or ()
    launches = [launch for part in plan["parts"].values() for launch in part]
    for launch, kernel in zip(launches, kernels, strict=True):
        launch["declared"] = {"flops": kernel.flops, "operations": [asdict(op) for op in kernel.source_ops]}
    return plan
