"""A rank's PyTorch worker: one of several processes, each with a GPU and NCCL, or a CPU and gloo."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from xlafuse.triton_side.parallel.ranks import Ranks

from ...base import host
from ...base.worker_protocol import Skip
from ...graph.build.from_inductor import from_inductor
from ...graph.build.from_launches import from_launches
from ...graph.model import FusionGraph
from ...measure.clock import CuptiClock, cupti_missing
from ...measure.rank_measurement import Rank, RankProgram
from ...measure.worker_backend import Arrays
from ...numerics import input_arrays
from ...spec.blocks import BLOCKS
from ...spec.case import Case
from ...spec.implementation import Implementation, load
from ..rank_service import RankService, rank_of_environment
from .prepare import eager_graph, finished, program_of, record_case
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
    return RankService(TorchRankBackend(rank), rank).methods()


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

    def build(  # type: ignore[override]
        self, case: Case, implementation: Implementation, folder: Path, dumps: Path, *, communicate: bool
    ) -> RankProgram:
        set_precision(case.precision)
        ranks = Ranks(self.rank.number, self.rank.count, dist.group.WORLD, communicate)
        function = implementation.load()
        apply = partial(function, ranks=ranks, **BLOCKS[case.block].attributes_of(case))
        held = RankProgram(case, program_of(case, apply), [folder])
        prepare: Callable[..., None] = load(implementation.backend.prepare)
        prepare(self, held, implementation, apply, self.inputs(folder, case), dumps)
        return held

    def inputs(self, folder: Path, case: Case) -> Arrays:
        block = BLOCKS[case.block]
        self._tensors = {t.name: t for t in (*block.inputs, *block.outputs)}
        return super().inputs(folder, case)

    def local(self, array: torch.Tensor) -> Any:
        values = array.detach()
        return (values.float() if values.element_size() < 4 else values).cpu().numpy()

    def release_memory(self, *, idle: bool = True) -> None:
        super().release_memory(idle=True)

    def _stored(self, folder: Path, role: str, name: str, dtype: str = "") -> torch.Tensor:
        """Return this rank's slice of the stored array."""
        if folder.parent != self._case_folder:
            self._case_folder, self._cache = folder.parent, {}
            torch.compiler.reset()
        key = (folder, role, name)
        if key not in self._cache:
            whole = np.load(input_arrays.path_of(folder, role, name), mmap_mode="r")
            own = np.array(self._tensors[name].of_rank(whole, self.rank.number, self.rank.count))
            tensor = torch.from_numpy(own)
            typed = tensor.view(getattr(torch, dtype)) if dtype in input_arrays.BITS else tensor
            self._cache[key] = typed.to(self._device)
        return self._cache[key]


Apply = Callable[[Arrays], Arrays]


def eager(
    backend: TorchRankBackend, held: RankProgram, implementation: Implementation, apply: Apply, inputs: Arrays,
    dumps: Path,
) -> None:
    """Make the first call. The graph has the operations of a recorded call."""
    _first_call(backend, held, inputs)
    held.graph = partial(eager_graph, backend, held.case, implementation, apply, inputs, {})


def inductor(
    backend: TorchRankBackend, held: RankProgram, implementation: Implementation, apply: Apply, inputs: Arrays,
    dumps: Path,
) -> None:
    """Make the first call, in which the function calls torch.compile, and keep Inductor's output."""
    from xlafuse.triton_side.inductor import compiler

    held.program.intercepts_allocations = False
    with compiler.capture() as captured:
        _first_call(backend, held, inputs)
    held.program.artifacts = backend.artifact_writer.submit(captured.write, dumps)
    held.graph = lambda: finished(
        from_inductor(captured, versions=host.installed("torch", "triton")), held.case, implementation
    )


def kernels(
    backend: TorchRankBackend, held: RankProgram, implementation: Implementation, apply: Apply, inputs: Arrays,
    dumps: Path,
) -> None:
    """Make the first call of hand-written Triton. The graph has the launches of a recorded call."""
    if not backend.has_gpu:
        raise Skip("hand-written Triton over several GPUs runs on GPUs only")
    _first_call(backend, held, inputs)

    def graph() -> FusionGraph:
        return from_launches(
            record_case(held.case, apply, inputs, {}), name=implementation.name, compiler=implementation.backend.name,
            versions=host.installed("torch", "triton"),
        )

    held.graph = lambda: finished(graph(), held.case, implementation)


def _first_call(backend: TorchRankBackend, held: RankProgram, inputs: Arrays) -> None:
    started = time.perf_counter()
    backend.synchronize(held.program.forward(inputs))
    held.program.compile_s = time.perf_counter() - started
