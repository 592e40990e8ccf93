"""Programs of one case in PyTorch: eager operations, TorchInductor, hand-written kernels."""

from __future__ import annotations

import importlib.util
import time
import types
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from xlafuse.triton_side.calls import dispatch
from xlafuse.triton_side.calls.launches import Launch

from ...base import host
from ...base.worker_protocol import NotAutotuned, Skip
from ...graph.analyse.summary import portable_lines
from ...graph.build.from_eager import from_eager
from ...graph.build.from_inductor import from_inductor
from ...graph.build.from_launches import from_launches
from ...graph.build.phases import as_one_phase
from ...graph.model import FusionGraph
from ...measure.clock import CuptiClock, DeviceRecord
from ...measure.worker_backend import Arrays, Program
from ...spec.blocks import BLOCKS
from ...spec.case import Case
from ...spec.implementation import Implementation
from .. import autotune_lock
from . import cuda_graphs, inductor_graphs

if TYPE_CHECKING:
    from .worker import TorchBackend

Apply = Callable[[Arrays], Arrays]  # an implementation's function with its attributes


def eager(
    backend: TorchBackend, case: Case, implementation: Implementation, folder: Path, dumps: Path, autotune: bool
) -> Program:
    """Return a program that launches one operation after the other, with its operations as the graph on a GPU."""
    apply = _apply(case, implementation)
    inputs, cotangents = backend.inputs(folder, case), backend.cotangents(folder, case)
    program = program_of(case, apply)
    if backend.has_gpu:
        program.graph = eager_graph(backend, case, implementation, apply, inputs, cotangents)
    return program


def inductor(
    backend: TorchBackend, case: Case, implementation: Implementation, folder: Path, dumps: Path, autotune: bool
) -> Program:
    """Compile by torch.compile, at the first call of each phase, and read the graph from Inductor's output."""
    from xlafuse.triton_side.inductor import compiler

    if implementation.backend.autotunes_for_minutes and not autotune:
        raise NotAutotuned("max-autotune times kernels")
    options = implementation.backend.options
    inputs, cotangents = backend.inputs(folder, case), backend.cotangents(folder, case)
    function = implementation.load()
    if not options.get("compiles_itself"):
        function = compiler.compile(_copy(function), mode=options.get("mode"))
    program = program_of(case, partial(function, **BLOCKS[case.block].attributes_of(case)))
    program.intercepts_allocations = False
    if implementation.backend.replays_graphs:
        compiler.mark_static(inputs[name] for name in implementation.static_inputs)
        program.forward = inductor_graphs.beginning_a_step(program.forward)
    waiting = autotune_lock.WaitingTime()
    with compiler.cuda_graph_skips() as skips:
        with compiler.benchmark_under_lock(waiting.held), compiler.capture() as captured:
            started = time.perf_counter()
            saved = program.forward(inputs)[1]
            backend.synchronize()
            if program.backward:
                program.backward(saved, cotangents)
                backend.synchronize()
            del saved
            program.compile_s = time.perf_counter() - started - waiting.seconds
        if implementation.backend.replays_graphs:
            program = inductor_graphs.replayed(
                backend, program, implementation.static_inputs, inputs, cotangents, skips
            )
    program.artifacts = backend.artifact_writer.submit(captured.write, dumps)
    graph = from_inductor(captured, versions=host.installed("torch", "triton"))
    program.graph = finished(graph, case, implementation)
    return program


def kernels(
    backend: TorchBackend, case: Case, implementation: Implementation, folder: Path, dumps: Path, autotune: bool
) -> Program:
    """Compile hand-written Triton or CUDA at a recorded first call, whose launches make the graph."""
    if "triton" in implementation.backend.requires and importlib.util.find_spec("triton") is None:
        raise Skip("triton is not installed (pip install triton)")
    apply = _apply(case, implementation)
    program = program_of(case, apply)
    if backend.interprets:
        if problem := host.interpreter_problem(host.versions(("triton", "numpy"))):
            raise Skip(problem)
        return program
    inputs, cotangents = backend.inputs(folder, case), backend.cotangents(folder, case)
    started = time.perf_counter()
    recorded = record_case(case, apply, inputs, cotangents)
    backend.synchronize()
    if implementation.backend.replays_graphs:
        program = cuda_graphs.capture(program, inputs, cotangents, backend.known_clock)
    elif implementation.backend.name in ("triton", "own-torch"):
        events = (event for phase in recorded.parts.values() for event in phase)
        program.direct_launches = any(isinstance(event, Launch) and event.direct for event in events)
    program.compile_s = time.perf_counter() - started
    program.artifacts = backend.artifact_writer.submit(dispatch.write_launches, recorded, dumps)
    graph = from_launches(
        recorded, name=implementation.name, compiler=implementation.backend.name,
        versions=host.installed("torch", "triton"),
    )
    program.graph = finished(graph, case, implementation)
    return program


def _apply(case: Case, implementation: Implementation) -> Apply:
    return partial(implementation.load(), **BLOCKS[case.block].attributes_of(case))


def program_of(case: Case, apply: Apply) -> Program:
    """Return an implementation's function as a program of the case's direction, with autograd for its backward."""

    def forward(inputs: Arrays) -> tuple[Arrays, Any]:
        with torch.no_grad():
            return apply(inputs), None

    def forward_saving(inputs: Arrays) -> tuple[Arrays, Any]:
        outputs = apply(inputs)
        return {n: y.detach() for n, y in outputs.items()}, (outputs, inputs)

    def backward(saved: Any, cotangents: Arrays) -> Arrays:
        outputs, inputs = saved
        names = [n for n, x in inputs.items() if x.requires_grad]
        gradients = torch.autograd.grad(
            [outputs[n] for n in cotangents], [inputs[n] for n in names], [cotangents[n] for n in cotangents]
        )
        return dict(zip(names, gradients, strict=True))

    def joint(given: Arrays) -> tuple[Arrays, Any]:
        inputs, cotangents = BLOCKS[case.block].separated(given)
        outputs, saved = forward_saving(inputs)
        return outputs | {f"d_{name}": gradient for name, gradient in backward(saved, cotangents).items()}, None

    if case.direction == "train":
        return Program(forward_saving, backward, 0.0, None)
    return Program(joint if case.differentiates else forward, None, 0.0, None)


def eager_graph(
    backend: TorchBackend, case: Case, implementation: Implementation, apply: Apply, inputs: Arrays,
    cotangents: Arrays,
) -> FusionGraph:
    """Return the operations in order; with CUPTI, each with its kernels, from a call made for that alone."""
    clock = backend.known_clock if isinstance(backend.known_clock, CuptiClock) else None
    phases: list[str] = []

    def after_each(phase: str, index: int) -> None:
        if clock is not None:
            phases.append(phase)
            clock.lap(backend.synchronize)

    record = partial(record_case, case, apply, inputs, cotangents)
    record()  # the setup of a first call (handles, workspaces) belongs to no operation
    backend.synchronize()
    if clock is not None:
        clock.start()
    recorded = record(after_each=after_each)
    launched: dict[str, list[tuple[DeviceRecord, ...]]] | None = None
    if clock is not None:
        launched = {phase: [] for phase in recorded.parts}
        for phase, sample in zip(phases, clock.collect(), strict=True):
            launched[phase].append(sample.records or ())
    versions = host.installed("torch", "triton")
    graph = from_eager(recorded, name=implementation.name, kernels=launched, versions=versions)
    return finished(graph, case, implementation)


def record_case(
    case: Case, apply: Apply, inputs: Arrays, cotangents: Arrays,
    after_each: Callable[[str, int], None] | None = None,
) -> dispatch.Recorded:
    """Record a call's operations and launches; a joint program's forward and backward are recorded apart, too."""
    if case.direction == "joint":
        inputs, cotangents = BLOCKS[case.block].separated(inputs)
    return dispatch.record_call(
        apply, inputs, train=case.differentiates, cotangents=cotangents, after_each=after_each
    )


def finished(graph: FusionGraph, case: Case, implementation: Implementation) -> FusionGraph:
    graph = as_one_phase(graph) if case.direction == "joint" else graph
    return portable_lines(replace(graph, name=implementation.name))


def _copy(function: Any) -> Any:
    """Return the function with its own code object, which is Dynamo's key for compiled code.

    `train` and `joint` begin alike: with one code object the second would get the first one's program, and nothing
    would be captured.
    """
    copied = types.FunctionType(
        function.__code__.replace(), function.__globals__, function.__name__, function.__defaults__,
        function.__closure__,
    )
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied
