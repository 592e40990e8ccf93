"""The CUDA graphs that Inductor captures in mode reduce-overhead ("cudagraph trees").

The first call of a function compiles it and runs without a graph, the second captures forward and backward, and the
third replays them. A replay first copies inputs into the graph's memory, except those that are marked as static, as
every parameter of a module is. The next call writes over all results. torch.compiler.cudagraph_mark_step_begin tells
Inductor that it may.

Inductor runs a function without a graph where it finds a reason, as a tensor on the CPU or a mutated input. It says so
in its log, or not at all. Such a call is no replay, and raises Skip here.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ...base.worker_protocol import Skip
from ...measure.worker_backend import Arrays, GraphInputs, Program
from . import cuda_graphs

if TYPE_CHECKING:
    from .worker import TorchBackend

Forward = Callable[[Arrays], tuple[Arrays, Any]]


def beginning_a_step(forward: Forward) -> Forward:
    """Return the call with the mark before it that its graphs may write over the results of the last call."""

    def begun(inputs: Arrays) -> tuple[Arrays, Any]:
        torch.compiler.cudagraph_mark_step_begin()
        return forward(inputs)

    return begun


def replayed(
    backend: TorchBackend, program: Program, static: tuple[str, ...], inputs: Arrays, cotangents: Arrays,
    skips: list[str],
) -> Program:
    """Return a program that made its first call as one that replays: with its graphs' memory, peaks and launches.

    static: names of the inputs that are marked as static. skips: gets Inductor's reasons for calls without a graph.
    Raises Skip where forward or backward is not replayed.
    """
    kept: list[Any] = []  # the last call's results, and what its forward saved
    phases = {"forward": lambda: kept.append(program.forward(inputs))}
    if (compiled := program.backward) is not None:
        phases["backward"] = lambda: kept.append(compiled(kept[0][1], cotangents))

    started = time.perf_counter()
    peaks = {phase: backend.peak_memory(program, phase, call) for phase, call in phases.items()}
    compile_s = program.compile_s + time.perf_counter() - started
    kept.clear()
    for call in phases.values():
        call()
    pools = cuda_graphs.pools_of(array for arrays in (kept[0][0], *kept[1:]) for array in arrays.values())
    found = replace(
        program, compile_s=compile_s, peaks=peaks, poison=partial(cuda_graphs.poison, pools),
        graph_inputs=GraphInputs(
            static, tuple(name for name in cuda_graphs.input_names(inputs, cotangents) if name not in static)
        ),
    )
    kept.clear()
    found.command_buffers = cuda_graphs.replayed_launches(found, inputs, cotangents, backend.known_clock)
    missing = [phase for phase, (inside, _) in (found.command_buffers or {}).items() if not inside]
    if skips or missing:
        reason = skips[0] if skips else f"Inductor launched {' and '.join(missing)} without one and gave no reason"
        raise Skip(f"not replayed as CUDA graphs: {reason}")
    return found
