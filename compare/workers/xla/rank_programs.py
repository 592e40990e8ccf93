"""Programs of cases that span several GPUs: for the devices of this process's mesh, or for GPUs that are not there."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from xlafuse.compile import compiler, directions
from xlafuse.parallel import program as parallel
from xlafuse.parallel.ranks import Ranks

from ... import targets
from ...graph.model import FusionGraph
from ...measure.worker_backend import Arrays
from ...spec.blocks import BLOCKS
from ...spec.case import Case
from ...spec.implementation import Implementation
from ...spec.tensor import Tensor
from . import prepare as one_gpu


def spec_of(tensor: Tensor) -> PartitionSpec:
    return parallel.spec(tensor.axes, tensor.split)


def flags_of(case: Case, implementation: Implementation) -> dict[str, Any]:
    """Return XLA's flags for the implementation; `ranks_flag` names one whose value is the number of ranks."""
    options = implementation.backend.options
    named = options.get("ranks_flag")
    return {**options.get("flags", {}), **({named: case.ranks} if named else {})}


def program_of(
    case: Case, implementation: Implementation, mesh: Mesh, communicate: bool = True
) -> Callable[[Arrays], Arrays]:
    """Return the case's function of arrays over the mesh, outputs and gradients named as in `Block.joined`."""
    block = BLOCKS[case.block]
    apply, names = implementation.load(), [t.name for t in block.outputs]
    given = {t.name: spec_of(t) for t in block.inputs}
    results = {t.name: spec_of(t) for t in block.outputs}
    attributes = block.attributes_of(case)
    partitioned = implementation.backend.options.get("partitioned", False)
    ranks = Ranks(case.ranks, communicate)
    attributes |= {"mesh": mesh} if partitioned else {"ranks": ranks}
    if case.differentiates:
        step = directions.joint(apply, attributes, names)
        gradients = {f"d_{t.name}": spec_of(t) for t in block.inputs if t.differentiable}
        given |= {f"d_{name}": spec for name, spec in results.items()}
        results |= gradients
        whole = [t.name for t in block.inputs if t.split is None]
        step = step if partitioned else parallel.summing_gradients(step, whole, ranks.all_reduce)
    else:
        step = directions.forward(apply, attributes)
    if partitioned:
        return parallel.partitioned(step, mesh, results)
    return parallel.of_slices(step, mesh, given, results)


def compile_for_target(
    case: Case, implementation: Implementation, target: str, dumps: Path
) -> tuple[float, FusionGraph]:
    """Return the compile time in seconds and one GPU's fusion graph for several of a target's GPUs; nothing runs."""
    block, pack = BLOCKS[case.block], targets.load(target)
    described = compiler.Target(
        pack.xla_config(version("jax")), pack.xla_autotune_results(version("jax")), devices=case.ranks
    )
    mesh = parallel.mesh_of(compiler.target_devices(described))

    def structs(tensors: tuple[Tensor, ...]) -> dict[str, jax.ShapeDtypeStruct]:
        return {
            t.name: jax.ShapeDtypeStruct(
                t.shape(case.sizes), jax.numpy.dtype(t.dtype_in(case)), sharding=NamedSharding(mesh, spec_of(t))
            )
            for t in tensors
        }

    inputs: dict[str, Any] = structs(block.inputs)
    if case.differentiates:
        inputs = block.joined(inputs, structs(block.outputs))
    compiled = compiler.compile(
        program_of(case, implementation, mesh), [inputs], target=described, dump_to=dumps / "forward",
        matmul_precision="tf32" if case.precision == "tf32" else "ieee",
        options=flags_of(case, implementation),
    )
    graph = one_gpu.graph_of_halves({"forward": compiled}, dumps, name=implementation.name, target=target)
    return compiled.compile_s, graph
