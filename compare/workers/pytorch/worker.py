"""The PyTorch worker: it serves eager, library, Inductor, Triton and CUDA programs on this process's GPU or CPU.

A process with TRITON_INTERPRET=1 checks Triton kernels on the CPU.
"""

from __future__ import annotations

import itertools
import os
import platform
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ...base import host
from ...base.worker_protocol import Skip
from ...measure import ceilings
from ...measure.clock import Clock, CuptiClock, Sample, cupti_missing
from ...measure.l2_flush import L2Flush
from ...measure.worker_backend import Arrays, Extent, PeakMemory, Program, lies_within
from ...numerics import input_arrays
from ...spec.blocks import BLOCKS, requirements
from ...spec.case import CONTIGUOUS, TRANSPOSED, Case
from ...spec.implementation import Implementation, load
from ...spec.tensor import Tensor
from ..service import Service
from . import cuda_graphs, stream_order

_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def methods() -> dict[str, Callable[..., Any]]:
    backend = TorchBackend()
    service = Service(backend)

    def measure_ceilings() -> dict[str, Any]:
        assert service.clock is not None, "ceilings are measured on a GPU"
        return ceilings.measure(service.clock, backend.flush_l2)

    return service.methods() | {"ceilings": measure_ceilings}


def launch_table() -> str | None:
    """Return the table from which hand-written Triton kernels take launch configurations, or None for their rules."""
    if not host.installed("triton"):
        return None
    from xlafuse.triton_side.configs import tuned

    return tuned.table_in_use()


class TorchBackend:
    """PyTorch as a compare.measure.worker_backend.WorkerBackend.

    interprets: Triton's kernels run in its interpreter. artifact_writer: the thread that writes programs' artifacts.
    """

    def __init__(self) -> None:
        self.interprets = _INTERPRETED
        self.has_gpu = torch.cuda.is_available() and not _INTERPRETED
        self._device = torch.device("cuda" if self.has_gpu else "cpu")
        self.device = torch.cuda.get_device_name() if self.has_gpu else "cpu"
        self.name = "interpreter" if _INTERPRETED else "torch"
        self.known_clock: Clock | None = None
        self.artifact_writer = ThreadPoolExecutor(1)
        self.flush_l2 = L2Flush(lambda n: torch.ones(n, device="cuda"), torch.Tensor.sum)
        self._case_folder: Path | None = None
        self._cache: dict[Any, torch.Tensor] = {}
        self._usable = True

    def environment(self) -> dict[str, Any]:
        packages = ("torch", "triton", "cuda-core", "cuda-bindings", "cupti-python")
        optional = host.versions(map(host.distribution, requirements("torch")))
        found: dict[str, Any] = {
            "python": platform.python_version(), "device": self.device, "cuda": torch.version.cuda,
            **host.versions(packages), **{name: found for name, found in optional.items() if found},
        }
        if self.has_gpu:
            properties = torch.cuda.get_device_properties()
            found |= {
                "memory_bytes": properties.total_memory, "free_bytes": torch.cuda.mem_get_info()[0],
                "multiprocessors": properties.multi_processor_count,
                "l2_bytes": properties.L2_cache_size, "cudnn": torch.backends.cudnn.version(),
                "launch_table": launch_table(),
            }
        return found

    def clock(self) -> Clock | None:
        if self.has_gpu and self.known_clock is None:
            self.known_clock = EventClock() if cupti_missing() else CuptiClock()
        return self.known_clock

    def build(
        self, case: Case, implementation: Implementation, folder: Path, dumps: Path, autotune: bool = True
    ) -> Program:
        set_precision(case.precision)
        try:
            program: Program = load(implementation.backend.prepare)(self, case, implementation, folder, dumps, autotune)
        except cuda_graphs.CaptureFailed:
            self._usable = False
            raise
        if implementation.own is not None:
            program.renew_inputs = partial(self._renew_inputs, folder, case, itertools.count(1))
        return program

    def _renew_inputs(self, folder: Path, case: Case, calls: Iterator[int]) -> None:
        """Write the case's bits into its live buffers again; those of floats begin at the next call's element."""
        block = BLOCKS[case.block]
        cotangents = block.outputs if case.differentiates else ()
        given = [*(("input", t) for t in block.inputs), *(("cotangent", t) for t in cotangents)]
        call = next(calls)
        for role, tensor in given:
            bits = self._stored(folder, role, tensor.name, tensor.dtype_in(case)).view(-1)
            live = self._cache[(case.direction, "live", role, tensor.name)].detach().view(-1)
            first = call % len(live) if live.is_floating_point() else 0
            live[: len(live) - first].copy_(bits[first:])
            live[len(live) - first :].copy_(bits[:first])

    def inputs(self, folder: Path, case: Case) -> Arrays:
        """Copy the set's bits into buffers that every input set of a case shares."""
        block = BLOCKS[case.block]
        live = {
            t.name: self._live(
                folder, case, "input", t, layout=case.layout, trained=case.differentiates and t.differentiable
            )
            for t in block.inputs
        }
        return block.joined(live, self._all_cotangents(folder, case)) if case.direction == "joint" else live

    def cotangents(self, folder: Path, case: Case) -> Arrays:
        return self._all_cotangents(folder, case) if "backward" in case.phases else {}

    def _all_cotangents(self, folder: Path, case: Case) -> Arrays:
        if not case.differentiates:
            return {}
        outputs = BLOCKS[case.block].outputs
        return {t.name: self._live(folder, case, "cotangent", t) for t in outputs}

    def _live(
        self, folder: Path, case: Case, role: str, tensor: Tensor, layout: str = CONTIGUOUS, trained: bool = False
    ) -> torch.Tensor:
        """Copy the stored bits into a buffer that stays; a CUDA graph reads it by its address."""
        stored = self._stored(folder, role, tensor.name, tensor.dtype_in(case))
        key = (case.direction, "live", role, tensor.name)
        if key not in self._cache:
            self._cache[key] = _empty_like(stored, layout).requires_grad_(trained)
        live = self._cache[key]
        with torch.no_grad():
            live.copy_(stored)
        return live

    def changed_inputs(self, inputs: Arrays, folder: Path, case: Case) -> list[str]:
        tensors = BLOCKS[case.block].inputs
        pristine = {t.name: self._stored(folder, "input", t.name, t.dtype_in(case)) for t in tensors}
        return [n for n, x in pristine.items() if not torch.equal(_bits(x), _bits(inputs[n]))]

    def reference(self, folder: Path, role: str, name: str) -> torch.Tensor:
        return self._stored(folder, role, name)

    def largest_difference(self, values: torch.Tensor, reference: torch.Tensor) -> float:
        return float((reference - values.detach()).abs_().max())  # float64, as the reference; one copy of a large case

    def largest_differences_by_row(self, values: torch.Tensor, reference: torch.Tensor) -> list[float]:
        rows: list[float] = (reference - values.detach()).abs_().amax(-1).tolist()
        return rows

    def poisoned_allocations(self, program: Program) -> AbstractContextManager[Any]:
        if program.poison is not None:
            program.poison("forward")  # a replay allocates nothing, so its memory is filled before the call
        return NanEmpty() if program.intercepts_allocations else nullcontext()

    def poison(self, program: Program, phase: str) -> list[Extent]:
        """Fill every free block of the caching allocator with NaN bits; the call gets its memory from these blocks.

        They are written by address, because allocating them would leave the allocator with more blocks each time.
        """
        free = cuda_graphs.free_memory()
        cuda_graphs.fill_with_nan(free)
        return free

    def was_poisoned(self, poisoned: list[Extent], arrays: Arrays) -> bool:
        return all(lies_within(cuda_graphs.extent(array), poisoned) for array in arrays.values())

    @contextmanager
    def in_mode(
        self, program: Program, mode: str, inputs: Arrays, cotangents: Arrays
    ) -> Iterator[Program | None]:
        if program.graph_inputs is not None and mode == "no-graph":
            raise Skip("every call replays graphs; the implementation without -cudagraphs launches these kernels")
        if mode == "triton-launch" and program.direct_launches:
            from xlafuse.triton_side.calls.direct_launch import by_triton

            with by_triton():
                yield program
            return
        if program.graph_inputs is not None or mode in ("no-graph", "triton-launch"):
            yield None  # PyTorch launches every other program one kernel at a time
            return
        try:
            with cuda_graphs.captured(program, inputs, cotangents) as replayed:
                yield replayed
        except cuda_graphs.CaptureFailed:
            self._usable = False
            raise

    def synchronize(self, results: Any = None) -> None:
        if self.has_gpu:
            torch.cuda.synchronize()

    def needs_restart(self, kept: int) -> bool:
        return False  # PyTorch's allocator returns memory to the GPU

    def release_memory(self, *, idle: bool) -> None:
        if idle:
            self._case_folder, self._cache = None, {}
            torch.compiler.reset()  # frees the memory of Inductor's CUDA graphs
        if self.has_gpu:
            torch.cuda.empty_cache()  # of max-autotune's candidates, and of large cases' float64 differences

    def peak_memory(self, program: Program, phase: str, call: Callable[[], Any]) -> PeakMemory:
        if not self.has_gpu:
            return PeakMemory(None, reason="PyTorch counts allocations on a GPU only")
        if phase in program.peaks:
            return program.peaks[phase]
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        torch.cuda.synchronize()
        return PeakMemory(torch.cuda.max_memory_allocated() - before)

    def late_results(self, program: Program, phase: str, call: Callable[[], Arrays]) -> list[str]:
        if not self.has_gpu:
            call()
            return []  # a call on the CPU returns when its results are there
        (program.poison or partial(self.poison, program))(phase)  # a late result is then NaN, not the last call's
        self.synchronize()
        return stream_order.late(call)

    def device_works(self) -> bool:
        try:
            self.synchronize()
        except RuntimeError:
            return False
        return self._usable

    def _stored(self, folder: Path, role: str, name: str, dtype: str = "") -> torch.Tensor:
        if folder.parent != self._case_folder:  # a new case frees the last one's arrays
            self._case_folder, self._cache = folder.parent, {}
            # The last case's programs would fill Dynamo's recompile limit. A reset within a case would make its
            # programs compile again at their next call.
            torch.compiler.reset()
        key = (folder, role, name)
        if key not in self._cache:
            tensor = torch.from_numpy(self._loaded(input_arrays.path_of(folder, role, name), name))
            typed = tensor.view(getattr(torch, dtype)) if dtype in input_arrays.BITS else tensor
            self._cache[key] = typed.to(self._device)
        return self._cache[key]

    def _loaded(self, file: Path, name: str) -> Any:
        return np.load(file)


class EventClock:
    """CUDA events around each call, for a machine without CUPTI.

    Its times include the gap before the first kernel, so they are never compared with CUPTI's. It sees no single
    kernels: neither their number nor the gaps between them.
    """

    name = "cuda-events"

    def start(self) -> None:
        self._pairs: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def time(self, call: Callable[[], Any], synchronize: Callable[..., None]) -> Any:
        synchronize()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        result = call()
        end.record()
        synchronize(result)
        self._pairs.append((begin, end))
        return result

    def collect(self, *, going_on: bool = False) -> list[Sample]:
        samples = [Sample(begin.elapsed_time(end) * 1e-3, None, None) for begin, end in self._pairs]
        self._pairs = []
        return samples


class NanEmpty(TorchDispatchMode):
    """Fills floating-point results of torch.empty and its kin with NaN, so that an unwritten element shows."""

    _EMPTY = {
        torch.ops.aten.empty.memory_format, torch.ops.aten.empty_like.default, torch.ops.aten.new_empty.default,
        torch.ops.aten.empty_strided.default, torch.ops.aten.new_empty_strided.default,
    }

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function in self._EMPTY and result.is_floating_point():
            result.fill_(float("nan"))
        return result


def set_precision(precision: str) -> None:
    """Set float32 products to IEEE or TF32. Half types accumulate in float32, as in XLA; PyTorch's default may not."""
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False


def _empty_like(x: torch.Tensor, layout: str) -> torch.Tensor:
    if layout == TRANSPOSED and x.ndim > 1:
        return torch.empty_like(x.mT, memory_format=torch.contiguous_format).mT
    return torch.empty_like(x)


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.detach().view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.element_size()])
