"""Compiles of one case by XLA, for this process's device or for one that is not there."""

from __future__ import annotations

import functools
import math
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from xlafuse.compile import compiler, directions, variants
from xlafuse.compile._jax_private import interpreted_pallas
from xlafuse.dumps import artifacts

from ...base import host
from ...base.worker_protocol import NotAutotuned
from ...graph.analyse.summary import portable_lines
from ...graph.model import FusionGraph
from ...measure.worker_backend import Arrays, Program
from ...spec.blocks import BLOCKS
from ...spec.case import Case
from ...spec.implementation import Implementation, load
from .. import autotune_lock
from . import fusion_graph
from .target import xla_target

if TYPE_CHECKING:
    from .worker import XlaBackend

Halves = dict[str, compiler.Compilation]  # by phase


def prepare(
    backend: XlaBackend, case: Case, implementation: Implementation, folder: Path, dumps: Path, autotune: bool
) -> Program:
    """Compile the case for this process's device; see compare.measure.worker_backend.WorkerBackend.build."""
    replays = backend.recorded_choices is not None
    if backend.has_gpu and not replays and not autotune:
        raise NotAutotuned("no autotuning results of XLA are recorded")
    inputs, cotangents = backend.inputs(folder, case), backend.cotangents(folder, case)

    def compile_phase(phase: str, *args: Any, autotune: bool = True, **options: Any) -> compiler.Compilation:
        key = case.id, implementation.name, phase
        try:
            return compiler.compile(
                *args, autotune_lock=autotune_lock.held if autotune else None,
                reuses_results=replays and key not in backend.not_recorded, **options,
            )
        except compiler.AutotuningNeeded:
            backend.not_recorded.add(key)
            raise

    def compile_with(command_buffers: variants.CommandBuffers) -> Program:
        """Compile again; XLA keeps its autotuning choices for the life of a process."""
        with tempfile.TemporaryDirectory(prefix="xlafuse-") as scratch:
            halves = _compile(
                case, implementation, inputs, cotangents, Path(scratch),
                partial(compile_phase, command_buffers=command_buffers),
            )
            again = program_of_halves(halves, Path(scratch), has_gpu=backend.has_gpu)
        inside = sum(inside for inside, _ in (again.command_buffers or {}).values())
        if bool(inside) != (command_buffers == "all"):
            raise RuntimeError(f"{command_buffers} of its launches should be in command buffers; {inside} are")
        return again

    try:
        with nullcontext() if backend.has_gpu else _interpreter(implementation):
            halves = _compile(
                case, implementation, inputs, cotangents, dumps, partial(compile_phase, autotune=autotune)
            )
    except compiler.AutotuningNeeded as problem:
        raise NotAutotuned(str(problem)) from problem
    program = program_of_halves(halves, dumps, has_gpu=backend.has_gpu)
    program.graph = graph_of_halves(halves, dumps, name=implementation.name, target="")
    program.variants = _variants(program.command_buffers or {}, compile_with)
    return program


def _interpreter(implementation: Implementation) -> AbstractContextManager[Any]:
    """Return a context in which Pallas' interpreter of Mosaic GPU runs an implementation's kernels on a CPU."""
    return interpreted_pallas() if "interpreter" in implementation.backend.options else nullcontext()


def compile_for_target(
    case: Case, implementation: Implementation, target: str, dumps: Path, device: compiler.Target | None = None
) -> tuple[float, FusionGraph]:
    """Return the compile time in seconds and the fusion graph for a target pack; nothing runs.

    device: the target, with other results or predictions than the pack's.
    """
    block = BLOCKS[case.block]
    inputs, cotangents = (
        {t.name: jax.ShapeDtypeStruct(t.shape(case.sizes), jnp.dtype(t.dtype_in(case))) for t in tensors}
        for tensors in (block.inputs, block.outputs)
    )
    if case.direction == "joint":
        inputs = block.joined(inputs, cotangents)
    chosen = xla_target(target) if device is None else device

    def compile_phase(phase: str, *args: Any, **options: Any) -> compiler.Compilation:
        if chosen.platform == "tpu" and case.dtype != "float32":
            # On a TPU the precision of float32 products would change those of 16-bit types, too.
            options["matmul_precision"] = None
        return compiler.compile(*args, target=chosen, **options)

    halves = _compile(case, implementation, inputs, cotangents, dumps, compile_phase)
    graph = graph_of_halves(halves, dumps, name=implementation.name, target=target)
    return sum(half.compile_s for half in halves.values()), graph


def _compile(
    case: Case, implementation: Implementation, inputs: Arrays, cotangents: Arrays, dumps: Path,
    compile_phase: Callable[..., compiler.Compilation],
) -> Halves:
    """compile_phase: compiler.compile, with the phase as its first argument."""
    block, backend_options = BLOCKS[case.block], implementation.backend.options
    attributes = block.attributes_of(case)
    if "function" in backend_options:
        apply = load(backend_options["function"])(implementation.target, case.precision)
    else:
        apply = implementation.load()

    precision = "tf32" if case.precision == "tf32" else backend_options.get("matmul_precision", "ieee")

    def compiled(phase: str, function: Callable[..., Any], arguments: list[Any]) -> compiler.Compilation:
        return compile_phase(
            phase, function, arguments, variant=backend_options.get("variant", "default"),
            matmul_precision=precision, dump_to=dumps / phase,
        )

    if case.direction == "fwd":
        return {"forward": compiled("forward", directions.forward(apply, attributes), [inputs])}
    if case.direction == "joint":
        step = directions.joint(apply, attributes, [t.name for t in block.outputs])
        return {"forward": compiled("forward", step, [inputs])}
    recompute = backend_options.get("recompute", False)
    save, differentiate = directions.train_phases(apply, attributes, recompute=recompute)
    forward = compiled("forward", save, [inputs])
    residuals = forward.output_structs[1]
    return {"forward": forward, "backward": compiled("backward", differentiate, [residuals, cotangents])}


def program_of_halves(halves: Halves, dumps: Path, *, has_gpu: bool) -> Program:
    """Return the compiled functions as a program, without graph and variants."""
    forward = _executable(halves["forward"])
    found = {phase: artifacts.command_buffer_launches(dumps / phase) for phase in halves} if has_gpu else {}
    buffers = {phase: counts for phase, counts in found.items() if counts}
    return Program(
        forward=forward if "backward" in halves else lambda inputs: (forward(inputs), None),
        backward=_executable(halves["backward"]) if "backward" in halves else None,
        compile_s=sum(half.compile_s for half in halves.values()),
        graph=None,
        allocations={phase: _allocations(half) for phase, half in halves.items()},
        command_buffers=buffers if len(buffers) == len(halves) else None,
    )


def _variants(
    buffers: dict[str, tuple[int, int]], compile_with: Callable[[variants.CommandBuffers], Program]
) -> dict[str, Callable[[], Program]]:
    """Return the launch modes that the program does not have yet; each is compiled at its first use."""
    found: dict[str, Callable[[], Program]] = {}
    if any(inside < total for inside, total in buffers.values()):
        found["graph"] = functools.cache(lambda: compile_with("all"))
    if any(inside for inside, _ in buffers.values()):
        found["no-graph"] = functools.cache(lambda: compile_with("none"))
    return found


def _allocations(half: compiler.Compilation) -> list[int]:
    """Return the bytes of the buffers that one call allocates: each output, and the temporaries as one block."""
    outputs = [math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in half.computed_structs]
    return [size for size in [*outputs, half.memory.temporaries] if size]


def graph_of_halves(halves: Halves, dumps: Path, *, name: str, target: str) -> FusionGraph:
    versions = host.installed("jax", "jaxlib")
    forward = halves["forward"]
    if "backward" in halves:
        outputs = len(jax.tree.leaves(forward.output_structs[0]))
        graph = fusion_graph.of_halves(
            forward, halves["backward"], dumps, outputs=outputs, target=target, versions=versions
        )
    else:
        graph, _ = fusion_graph.of_module(forward, dumps / "forward", target=target, versions=versions)
    return replace(portable_lines(graph), name=name)


def _executable(half: compiler.Compilation) -> Callable[..., Any]:
    assert half.executable is not None, "compiled for a target, not for this device"
    return half.executable
