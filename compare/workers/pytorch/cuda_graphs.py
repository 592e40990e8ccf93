"""A PyTorch program's launches, captured as CUDA graphs and replayed: forward and backward, one graph each.

The steps are those of torch.cuda.make_graphed_callables: calls on a side stream until everything that happens once has
happened, then a capture of forward, then one of backward from the same memory pool. Arrays stay where the capture found
them: inputs and cotangents must be the ones captured, and results are the same memory at every replay.
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
    """The launches could not be captured. PyTorch's allocator then still takes a capture to be underway
    (CUDAGraph::capture_end), so that this process is of no further use."""


@contextmanager
def captured(program: Program, inputs: Arrays, cotangents: Arrays) -> Iterator[Program]:
    """The program on these very arrays, each part one replay; its memory is given back at the end.

    Raises CaptureFailed, and whatever the program raises before its capture.
    """
    gc.collect()  # an autograd node left over from another stream would make the capture depend on that
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
    """Two graphs and the results that they write."""

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

    def poison(self, part: str) -> list[Extent]:
        """All before forward: a gradient may lie where forward leaves something for backward."""
        if part == "forward":
            with torch.no_grad():
                for x in self._own:
                    x.fill_(float("nan"))
        return [extent(x) for x in self._own]

    def release(self) -> None:
        torch.cuda.synchronize()
        self._outputs, self._gradients, self._own = {}, {}, []
        self._graphs = ()
        torch.cuda.empty_cache()  # else the graphs' free memory stays apart from what other calls may use


def extent(array: torch.Tensor) -> Extent:
    """First and one-past-last address."""
    start = array.data_ptr()
    return start, start + array.numel() * array.element_size()


@cache
def _side_stream() -> torch.cuda.Stream:
    """One for the life of the process: cuBLAS keeps a workspace for each stream that it was used on."""
    return torch.cuda.Stream()
