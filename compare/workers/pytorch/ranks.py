"""A rank's PyTorch worker: one of several processes, each with a GPU and NCCL, or a CPU and gloo."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from xlafuse.triton_side.parallel.peer_buffers import RepeatedExchanges
from xlafuse.triton_side.parallel.ranks import Ranks

from ...base import host
from ...base.worker_protocol import Skip
from ...graph.analyse.exchange import between
from ...graph.build.from_inductor import from_inductor
from ...graph.build.from_launches import from_launches
from ...graph.model import FusionGraph
from ...measure.clock import CuptiClock, cupti_missing
from ...measure.host_barrier import Rank
from ...measure.rank_measurement import RankProgram, with_alone
from ...measure.worker_backend import Arrays, Program
from ...spec.blocks import BLOCKS
from ...spec.case import Case
from ...spec.implementation import Implementation, load
from ..rank_group import rank_of_environment
from ..service import Service
from . import cuda_graphs
from .prepare import Apply, eager_graph, finished, program_of, record_case
from .worker import TorchBackend, set_precision

EXCHANGE_SECONDS = 60  # a rank that waits longer for the others ends


def methods() -> dict[str, Callable[..., Any]]:
    rank, coordinator = rank_of_environment()
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(rank.number)
    dist.init_process_group(
        "nccl" if on_gpu else "gloo", init_method=f"tcp://{coordinator}", rank=rank.number, world_size=rank.count,
        timeout=timedelta(seconds=EXCHANGE_SECONDS),
        device_id=torch.device("cuda", rank.number) if on_gpu else None,
    )
    return Service(TorchRankBackend(rank), partial(RankProgram, rank=rank)).methods()


class TorchRankBackend(TorchBackend):
    """PyTorch with this rank's slices."""

    def __init__(self, rank: Rank) -> None:
        super().__init__()
        self.rank = rank
        self._tensors: dict[str, Any] = {}

    def environment(self) -> dict[str, Any]:
        return {"device": self.device, "cuda": torch.version.cuda, "devices": self.rank.count,
                **host.versions(("torch", "triton", "cupti-python"))}

    def clock(self) -> CuptiClock | None:
        if not self.has_gpu or cupti_missing():
            return None
        self.known_clock = CuptiClock(peer_copies=True)
        return self.known_clock

    def build(
        self, case: Case, implementation: Implementation, folder: Path, dumps: Path, autotune: bool = True
    ) -> Program:
        set_precision(case.precision)
        return with_alone(partial(self._compiled, case, implementation, folder), dumps)

    def _compiled(
        self, case: Case, implementation: Implementation, folder: Path, dumps: Path, *, communicate: bool
    ) -> Program:
        ranks = Ranks(self.rank.number, self.rank.count, dist.group.WORLD, communicate)
        function = implementation.load()
        apply = partial(function, ranks=ranks, **BLOCKS[case.block].attributes_of(case))
        program = program_of(case, apply)
        prepare: Callable[..., Program] = load(implementation.backend.prepare)
        program = prepare(self, program, case, implementation, apply, self.inputs(folder, case), dumps)
        made = program.late_graph
        assert made is not None
        program.late_graph = lambda: between(made(), self.rank.count)
        return program

    def inputs(self, folder: Path, case: Case) -> Arrays:
        block = BLOCKS[case.block]
        self._tensors = {t.name: t for t in (*block.inputs, *block.outputs)}
        return super().inputs(folder, case)

    def local(self, array: torch.Tensor) -> Any:
        values = array.detach()
        return (values.float() if values.element_size() < 4 else values).cpu().numpy()

    def _loaded(self, file: Path, name: str) -> Any:
        """Return this rank's slice of the stored array."""
        whole = np.load(file, mmap_mode="r")
        return np.array(self._tensors[name].of_rank(whole, self.rank.number, self.rank.count))


def eager(
    backend: TorchRankBackend, program: Program, case: Case, implementation: Implementation, apply: Apply,
    inputs: Arrays, dumps: Path,
) -> Program:
    """Make the first call. The graph has the operations of a recorded call."""
    _first_call(backend, program, inputs)
    program.late_graph = partial(eager_graph, backend, case, implementation, apply, inputs, {})
    return program


def inductor(
    backend: TorchRankBackend, program: Program, case: Case, implementation: Implementation, apply: Apply,
    inputs: Arrays, dumps: Path,
) -> Program:
    """Make the first call, in which the function calls torch.compile, and keep Inductor's output."""
    from xlafuse.triton_side.inductor import compiler

    program.intercepts_allocations = False
    with compiler.capture() as captured:
        _first_call(backend, program, inputs)
    program.artifacts = backend.artifact_writer.submit(captured.write, dumps)
    program.late_graph = lambda: finished(
        from_inductor(captured, versions=host.installed("torch", "triton")), case, implementation
    )
    return program


def kernels(
    backend: TorchRankBackend, program: Program, case: Case, implementation: Implementation, apply: Apply,
    inputs: Arrays, dumps: Path,
) -> Program:
    """Make the first call of hand-written Triton, or capture it. The graph has the launches of a recorded call."""
    if not backend.has_gpu:
        raise Skip("hand-written Triton over several GPUs runs on GPUs only")
    if implementation.backend.replays_graphs:
        program = _captured(backend, program, inputs)
    else:
        _first_call(backend, program, inputs)

    def graph() -> FusionGraph:
        return from_launches(
            record_case(case, apply, inputs, {}), name=implementation.name, compiler=implementation.backend.name,
            versions=host.installed("torch", "triton"),
        )

    program.late_graph = lambda: finished(graph(), case, implementation)
    return program


def _captured(backend: TorchRankBackend, program: Program, inputs: Arrays) -> Program:
    """Return the program with its kernels, copies and waits for the peers in one CUDA graph."""
    exchanges = RepeatedExchanges()

    def forward(given: Arrays) -> tuple[Arrays, Any]:
        with exchanges.captured() if torch.cuda.is_current_stream_capturing() else exchanges.first():
            return program.forward(given)

    started = time.perf_counter()
    # NCCL's watchdog is another thread, and asks for events at any time.
    found = cuda_graphs.capture(
        replace(program, forward=forward), inputs, {}, backend.known_clock, error_mode="thread_local"
    )
    found.compile_s = time.perf_counter() - started
    return found


def _first_call(backend: TorchRankBackend, program: Program, inputs: Arrays) -> None:
    started = time.perf_counter()
    backend.synchronize(program.forward(inputs))
    program.compile_s = time.perf_counter() - started
