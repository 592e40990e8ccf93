"""A PyTorch program captured as CUDA graphs and replayed: one graph for forward, one for backward.

The steps are those of torch.cuda.make_graphed_callables: first calls on a side stream, which do all one-time setup,
then a capture of forward, then one of backward from the same memory pool. A replay reads the captured inputs and
cotangents, and writes its results to the same memory each time.

A graph's memory pool is private: other calls get nothing from it, also while the graph does not run. A replay writes
all that it reads there, so the whole pool may hold any bits when forward begins. Between forward and backward the pool
holds what forward saved.

This name is not public API (torch 2.11 to 2.13): `torch._C._cuda_clearCublasWorkspaces`, which frees the memory that
PyTorch gave to cuBLAS.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch

from ...base.worker_protocol import Skip
from ...measure.clock import CallTrace, Clock, CuptiClock
from ...measure.worker_backend import Arrays, Extent, GraphInputs, PeakMemory, Program

Pool = tuple[int, int]
SHARED_POOL: Pool = (0, 0)  # of all calls that are no graphs
_CALLS_BEFORE = 3
_clear_cublas_workspaces = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)  # a build without CUDA has none


class CaptureFailed(Exception):
    """A failed capture. PyTorch's allocator stays in capture mode (CUDAGraph::capture_end): this process must end."""


@contextmanager
def captured(program: Program, inputs: Arrays, cotangents: Arrays) -> Iterator[Program]:
    """Yield the program on these very arrays with one replay a phase, and free its memory at the end.

    Raises CaptureFailed, Skip where this PyTorch cannot be captured safely, and the program's own error before its
    capture.
    """
    replay = _captured(program, inputs, cotangents)
    try:
        yield replay.program(program)
    finally:
        replay.release()


def capture(
    program: Program, inputs: Arrays, cotangents: Arrays, clock: Clock | None, error_mode: str = "global"
) -> Program:
    """Return the program on these very arrays with one replay a phase. Its memory is free once the program is gone.

    error_mode: of torch.cuda.graph; "thread_local" allows other threads calls that a capture forbids.

    Raises CaptureFailed, Skip where this PyTorch cannot be captured safely, and the program's own error before its
    capture.
    """
    found = _captured(program, inputs, cotangents, error_mode).program(program)
    found.command_buffers = replayed_launches(found, inputs, cotangents, clock)
    return found


def _captured(program: Program, inputs: Arrays, cotangents: Arrays, error_mode: str = "global") -> _Replay:
    if _clear_cublas_workspaces is None:
        raise Skip(
            f"torch {torch.__version__} has no _cuda_clearCublasWorkspaces; a graph would use memory freed later"
        )
    inputs = _as_new_leaves(inputs)
    stream = _side_stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(_CALLS_BEFORE):
            peaks: dict[str, PeakMemory] = {}
            with _peak(peaks, "forward"):
                saved = program.forward(inputs)[1]
            if program.backward:
                with _peak(peaks, "backward"):
                    program.backward(saved, cotangents)
            del saved
    torch.cuda.synchronize()
    replay = _Replay(inputs, cotangents, peaks)
    try:
        replay.capture(program, stream, error_mode)
    except Exception as problem:
        raise CaptureFailed(f"no CUDA graph could be captured: {type(problem).__name__}: {problem}") from problem
    return replay


@contextmanager
def _peak(found: dict[str, PeakMemory], phase: str) -> Iterator[None]:
    """Add the peak of the memory allocated within. The workspace of cuBLAS is older, so it does not count."""
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    yield
    found[phase] = PeakMemory(torch.cuda.max_memory_allocated() - before)


def _as_new_leaves(arrays: Arrays) -> Arrays:
    """Return the same memory as tensors that no autograd graph has used.

    Autograd keeps the stream of a tensor's first use while any graph of it lives. A capture that waits for another
    stream fails.
    """
    return {name: array.detach().requires_grad_(array.requires_grad) for name, array in arrays.items()}


class _Replay:
    """The two graphs, the arrays that they read, and their results."""

    def __init__(self, inputs: Arrays, cotangents: Arrays, peaks: dict[str, PeakMemory]) -> None:
        self._graphs: tuple[torch.cuda.CUDAGraph, ...] = (torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph())
        self._inputs, self._cotangents = inputs, cotangents  # kept, because the graphs read this memory
        self._outputs: Arrays = {}
        self._gradients: Arrays = {}
        self._captured: Program | None = None
        self._peaks = peaks

    def capture(self, program: Program, stream: torch.cuda.Stream, error_mode: str) -> None:
        """Capture both graphs. cuBLAS gets workspaces of the graphs' own pool.

        Inductor frees the other ones when it captures, and a graph that used one would then read unmapped memory.
        """
        assert _clear_cublas_workspaces is not None
        self._captured = program  # kept, because the graphs also use memory that it owns
        _clear_cublas_workspaces()
        try:
            self._capture(program, stream, error_mode)
        finally:
            _clear_cublas_workspaces()

    def _capture(self, program: Program, stream: torch.cuda.Stream, error_mode: str) -> None:
        forward, backward = self._graphs
        with torch.cuda.graph(forward, stream=stream, capture_error_mode=error_mode):
            self._outputs, saved = program.forward(self._inputs)
        if program.backward:
            with torch.cuda.graph(backward, pool=forward.pool(), stream=stream, capture_error_mode=error_mode):
                self._gradients = program.backward(saved, self._cotangents)
        torch.cuda.synchronize()

    def program(self, plain: Program) -> Program:
        """Return the replays as a program; its graph, compile time and artifacts are those of the plain one."""
        pool = self._graphs[0].pool()
        return replace(
            plain, forward=self.forward, backward=self.backward if plain.backward else None,
            intercepts_allocations=False, poison=partial(poison, frozenset([pool])), peaks=self._peaks,
            graph_inputs=GraphInputs(static=input_names(self._inputs, self._cotangents), copied=()),
        )

    def forward(self, inputs: Arrays) -> tuple[Arrays, Any]:
        self._graphs[0].replay()
        return self._outputs, None

    def backward(self, saved: Any, cotangents: Arrays) -> Arrays:
        self._graphs[1].replay()
        return self._gradients

    def release(self) -> None:
        torch.cuda.synchronize()
        self._outputs, self._gradients, self._captured = {}, {}, None
        self._graphs = ()
        torch.cuda.empty_cache()  # else other calls cannot use the graphs' freed memory


def input_names(inputs: Arrays, cotangents: Arrays) -> tuple[str, ...]:
    """Return the names of all that a graph reads; the gradient of output y is d_y."""
    return (*inputs, *(f"d_{name}" for name in cotangents))


def pools_of(arrays: Iterable[torch.Tensor]) -> frozenset[Pool]:
    """Return the private pools in which these arrays lie."""
    segments = torch.cuda.memory_snapshot()
    found = {
        _pool(segment) for array in arrays for segment in segments
        if segment["address"] <= array.data_ptr() < segment["address"] + segment["total_size"]
    }
    return frozenset(found - {SHARED_POOL})


def poison(pools: frozenset[Pool], phase: str) -> list[Extent]:
    """Fill the pools with NaN bits before forward. Before backward they hold what forward saved."""
    if phase != "forward":
        return []
    extents = [
        (segment["address"], segment["address"] + segment["total_size"])
        for segment in torch.cuda.memory_snapshot() if _pool(segment) in pools
    ]
    fill_with_nan(extents)
    return extents


def fill_with_nan(extents: Iterable[Extent]) -> None:
    """Set all bits of this memory, which is a NaN in every float type, in the order of the current stream."""
    from cuda.bindings import driver

    stream = torch.cuda.current_stream().cuda_stream
    for address, end in extents:
        (status,) = driver.cuMemsetD8Async(address, 0xFF, end - address, stream)
        if status != driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"filling memory failed: {status.name}")


def free_memory() -> list[Extent]:
    """Return the free blocks of the caching allocator, from which a call that is no graph gets its memory."""
    return [
        (block["address"], block["address"] + block["size"])
        for segment in torch.cuda.memory_snapshot() if _pool(segment) == SHARED_POOL
        for block in segment["blocks"] if block["state"] == "inactive"
    ]


def _pool(segment: Any) -> Pool:
    first, second = segment["segment_pool_id"]
    return first, second


def replayed_launches(
    program: Program, inputs: Arrays, cotangents: Arrays, clock: Clock | None
) -> dict[str, tuple[int, int]] | None:
    """Return, for each phase of one call, its launches that a CUDA graph replayed and all its launches.

    None where no CUPTI tells them.
    """
    if not isinstance(clock, CuptiClock):
        return None
    (_, saved), forward = clock.trace(partial(program.forward, inputs), _synchronize)
    found = {"forward": _replayed(forward)}
    if program.backward:
        _, backward = clock.trace(partial(program.backward, saved, cotangents), _synchronize)
        found["backward"] = _replayed(backward)
    return found


def _replayed(trace: CallTrace) -> tuple[int, int]:
    graphs = {call.correlation for call in trace.host if "GraphLaunch" in call.name}
    return sum(record.correlation in graphs for record in trace.device), len(trace.device)


def _synchronize(results: Any = None) -> None:
    torch.cuda.synchronize()


def extent(array: torch.Tensor) -> Extent:
    """Return the first and one-past-last address."""
    start = array.data_ptr()
    return start, start + array.numel() * array.element_size()


@cache
def _side_stream() -> torch.cuda.Stream:
    """Return the process's one side stream, because cuBLAS keeps a workspace for every stream that used it."""
    return torch.cuda.Stream()
