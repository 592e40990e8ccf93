"""A PyTorch program captured as CUDA graphs and replayed: one graph for forward, one for backward.

The steps are those of torch.cuda.make_graphed_callables: first calls on a side stream, which do all one-time setup,
then a capture of forward, then one of backward from the same memory pool. A replay reads the captured inputs and
cotangents, and writes its results to the same memory each time.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

from ...measure.worker_backend import Arrays, Extent, Program

_CALLS_BEFORE = 3


class CaptureFailed(Exception):
    """A failed capture. PyTorch's allocator stays in capture mode (CUDAGraph::capture_end): this process must end."""


@contextmanager
def captured(program: Program, inputs: Arrays, cotangents: Arrays) -> Iterator[Program]:
    """Yield the program on these very arrays with one replay a phase, and free its memory at the end.

    Raises CaptureFailed, and the program's own error before its capture.
    """
    gc.collect()  # the capture would depend on another stream through an autograd node left from it
    stream = _side_stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(_CALLS_BEFORE):
            saved = program.forward(inputs)[1]
            if program.backward:
                program.backward(saved, cotangents)
            del saved
    torch.cuda.synchronize()
    replay = _Replay()
    try:
        replay.capture(program, inputs, cotangents, stream)
    except Exception as problem:
        raise CaptureFailed(f"no CUDA graph could be captured: {type(problem).__name__}: {problem}") from problem
    try:
        backward = replay.backward if program.backward else None
        yield Program(replay.forward, backward, program.compile_s, None, poison=replay.poison)
    finally:
        replay.release()


class _Replay:
    """The two graphs and their results."""

    def __init__(self) -> None:
        self._graphs: tuple[torch.cuda.CUDAGraph, ...] = (torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph())
        self._outputs: Arrays = {}
        self._gradients: Arrays = {}
        self._own: list[torch.Tensor] = []

    def capture(self, program: Program, inputs: Arrays, cotangents: Arrays, stream: torch.cuda.Stream) -> None:
        forward, backward = self._graphs
        with torch.cuda.graph(forward, stream=stream):
            self._outputs, saved = program.forward(inputs)
        if program.backward:
            with torch.cuda.graph(backward, pool=forward.pool(), stream=stream):
                self._gradients = program.backward(saved, cotangents)
        torch.cuda.synchronize()
        given = {x.untyped_storage().data_ptr() for x in (*inputs.values(), *cotangents.values())}
        results = (*self._outputs.values(), *self._gradients.values())
        self._own = [x for x in results if x.untyped_storage().data_ptr() not in given]

    def forward(self, inputs: Arrays) -> tuple[Arrays, Any]:
        self._graphs[0].replay()
        return self._outputs, None

    def backward(self, saved: Any, cotangents: Arrays) -> Arrays:
        self._graphs[1].replay()
        return self._gradients

    def poison(self, phase: str) -> list[Extent]:
        """Fill all results with NaN before forward; before backward, a gradient's memory may hold saved values."""
        if phase == "forward":
            with torch.no_grad():
                for x in self._own:
                    x.fill_(float("nan"))
        return [extent(x) for x in self._own]

    def release(self) -> None:
        torch.cuda.synchronize()
        self._outputs, self._gradients, self._own = {}, {}, []
        self._graphs = ()
        torch.cuda.empty_cache()  # else other calls cannot use the graphs' freed memory


def extent(array: torch.Tensor) -> Extent:
    """Return the first and one-past-last address."""
    start = array.data_ptr()
    return start, start + array.numel() * array.element_size()


@cache
def _side_stream() -> torch.cuda.Stream:
    """Return the process's one side stream, because cuBLAS keeps a workspace for every stream that used it."""
    return torch.cuda.Stream()
