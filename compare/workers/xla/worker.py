"""The XLA worker: it serves blocks that XLA compiles, on this process's device or for one that is not there."""

from __future__ import annotations

import functools
import os
import platform
import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib.metadata import version
from pathlib import Path
from typing import Any

from xlafuse.compile.environment import configure_environment
from xlafuse.compile.gpus import gpu_present

from ... import targets

_PACK = os.environ.get("XLAFUSE_TARGET_PACK")  # the folder that a run on a GPU fills for machines without that GPU
_HAS_GPU = gpu_present()
# XLA rewrites its file of choices, so each process has its own; the runner merges them when the run ends.
_OWN_CHOICES = (
    Path(_PACK) / "xla" / f"autotune-{version('jax')}.{os.getpid()}.textproto" if _PACK and _HAS_GPU else None
)
# The choices of this run's earlier processes, which the runner merged while none was running.
_RECORDED_CHOICES = targets.autotune_results(Path(_PACK) / "xla", version("jax")) if _OWN_CHOICES and _PACK else None
configure_environment(
    deviceless=not _HAS_GPU, tpu=targets.is_tpu(os.environ.get("XLAFUSE_TARGET")), record_autotune_to=_OWN_CHOICES,
    reuse_autotune_from=_RECORDED_CHOICES,
)

import jax  # noqa: E402  (XLA reads its flags when jax is imported)
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

from ...base import host  # noqa: E402
from ...base.paths import PROJECT  # noqa: E402
from ...base.worker_protocol import Skip  # noqa: E402
from ...graph import store  # noqa: E402
from ...measure import ptx_launch  # noqa: E402
from ...measure.clock import Clock, CuptiClock, cupti_missing  # noqa: E402
from ...measure.l2_flush import L2Flush  # noqa: E402
from ...measure.worker_backend import Arrays, Extent, PeakMemory, Program, lies_within  # noqa: E402
from ...numerics import input_arrays  # noqa: E402
from ...spec.blocks import BLOCKS  # noqa: E402
from ...spec.case import Case  # noqa: E402
from ...spec.implementation import Implementation, load  # noqa: E402
from ..service import Requested, Service, requested  # noqa: E402

# HLO names source files relative to the project, or to the packages of its environment.
jax.config.update("jax_hlo_source_file_canonicalization_regex", rf"^(?:{re.escape(str(PROJECT))}|.*/site-packages)/")


def methods() -> dict[str, Callable[..., Any]]:
    return Service(XlaBackend()).methods() | {"compile": compile_for_target}


def compile_for_target(case: dict[str, Any], implementation: Requested, target: str, dumps: str) -> dict[str, Any]:
    """Compile for a target pack; nothing runs."""
    spec, row = requested(case, implementation)
    assert row.backend.compile_for_target is not None, "its target worker is this one"
    compile_s, graph = load(row.backend.compile_for_target)(spec, row, target, Path(dumps))
    return {"compile_s": compile_s, "graph": store.to_json(graph)}


class XlaBackend:
    """XLA as a compare.measure.worker_backend.WorkerBackend.

    not_recorded: (case id, implementation, phase) of compiles for which the recorded choices lack one.
    """

    name = "xla"

    def __init__(self, device: jax.Device | None = None) -> None:
        """device: of this process's arrays, by default the first."""
        self.has_gpu, self.recorded_choices = _HAS_GPU, _RECORDED_CHOICES
        self.not_recorded: set[tuple[str, str, str]] = set()
        self._device = device or jax.devices()[0]
        self.device = self._device.device_kind if _HAS_GPU else "cpu"
        self._case_folder: Path | None = None
        self._cache: dict[Any, jax.Array] = {}
        self.flush_l2 = L2Flush(
            lambda n: jnp.ones(n, jnp.float32), lambda x: _sum(x).block_until_ready(),
            self._device.local_hardware_id or 0,
        )

    def environment(self) -> dict[str, Any]:
        packages = ("jax", "jaxlib", "jax-cuda13-pjrt", "jax-cuda13-plugin", "libtpu", "flax")
        memory = dict(zip(("free_bytes", "memory_bytes"), ptx_launch.memory(), strict=True)) if _HAS_GPU else {}
        return {"python": platform.python_version(), "device": self.device, **memory, **host.versions(packages)}

    def clock(self) -> Clock | None:
        return CuptiClock() if _HAS_GPU and not cupti_missing() else None

    def build(
        self, case: Case, implementation: Implementation, folder: Path, dumps: Path, autotune: bool = True
    ) -> Program:
        program: Program = load(implementation.backend.prepare)(self, case, implementation, folder, dumps, autotune)
        return program

    def inputs(self, folder: Path, case: Case) -> Arrays:
        block = BLOCKS[case.block]
        own = {t.name: self._stored(folder, "input", t.name, t.dtype_in(case)) for t in block.inputs}
        return block.joined(own, self._all_cotangents(folder, case)) if case.direction == "joint" else own

    def cotangents(self, folder: Path, case: Case) -> Arrays:
        return self._all_cotangents(folder, case) if "backward" in case.phases else {}

    def _all_cotangents(self, folder: Path, case: Case) -> Arrays:
        if not case.differentiates:
            return {}
        outputs = BLOCKS[case.block].outputs
        return {t.name: self._stored(folder, "cotangent", t.name, t.dtype_in(case)) for t in outputs}

    def changed_inputs(self, inputs: Arrays, folder: Path, case: Case) -> list[str]:
        pristine = {
            t.name: self._stored(folder, "input", t.name, t.dtype_in(case), copy="pristine")
            for t in BLOCKS[case.block].inputs
        }
        return [n for n, x in pristine.items() if not bool(_same_bits(x, inputs[n]))]

    def reference(self, folder: Path, role: str, name: str) -> Any:
        with jax.enable_x64(True):
            return self._stored(folder, role, name)

    def largest_difference(self, values: Any, reference: Any) -> float:
        with jax.enable_x64(True):
            return float(_largest_difference(values, reference))

    def largest_differences_by_row(self, values: Any, reference: Any) -> list[float]:
        with jax.enable_x64(True):
            rows: list[float] = _largest_differences_by_row(values, reference).tolist()
            return rows

    def poisoned_allocations(self, program: Program) -> AbstractContextManager[Any]:
        return nullcontext()  # XLA allocates inside its runtime; `poison` covers it on a GPU

    def poison(self, program: Program, phase: str) -> list[Extent]:
        """Allocate the sizes that the call will, fill them with NaN bits and free them.

        XLA's allocator hands the same memory out again.
        """
        blocks = [_filler(size)() for size in program.allocations[phase]]
        jax.block_until_ready(blocks)
        return [_extent(block) for block in blocks]

    def was_poisoned(self, poisoned: list[Extent], arrays: Arrays) -> bool:
        return all(lies_within(_extent(array), poisoned) for array in arrays.values())

    def in_mode(
        self, program: Program, mode: str, inputs: Arrays, cotangents: Arrays
    ) -> AbstractContextManager[Program | None]:
        if program.command_buffers is None:
            raise Skip("XLA's dump does not list its thunks, so its command buffers are unknown")
        compiled = program.variants.get(mode)
        return nullcontext(compiled() if compiled else None)

    def synchronize(self, results: Any = None) -> None:
        jax.block_until_ready(results)

    def peak_memory(self, program: Program, phase: str, call: Callable[[], Any]) -> PeakMemory:
        planned = sum(program.allocations[phase])
        return PeakMemory(None, planned, "XLA's allocator never resets its peak, so the number is the compiler's plan")

    def needs_restart(self, kept: int) -> bool:
        if not _HAS_GPU:
            return False
        found = self._device.memory_stats() or {}
        return max(found.get("pool_bytes", 0), found.get("bytes_in_use", 0)) > kept

    def release_memory(self, *, idle: bool) -> None:
        """Drop the last case's arrays when idle. XLA's allocator keeps its memory."""
        if idle:
            self._case_folder, self._cache = None, {}

    def late_results(self, program: Program, phase: str, call: Callable[[], Arrays]) -> list[str]:
        call()
        return []  # the runtime waits for the event that every array carries

    def device_works(self) -> bool:
        try:
            jax.block_until_ready(jnp.zeros((), jnp.float32) + 1)
        except RuntimeError:
            return False
        return True

    def _stored(self, folder: Path, role: str, name: str, dtype: str = "", copy: str = "live") -> jax.Array:
        if folder.parent != self._case_folder:  # a new case frees the last one's arrays
            self._case_folder, self._cache = folder.parent, {}
        key = (folder, role, name, copy)
        if key not in self._cache:
            self._cache[key] = self._on_device(input_arrays.path_of(folder, role, name), name, dtype)
        return self._cache[key]

    def _on_device(self, file: Path, name: str, dtype: str) -> jax.Array:
        stored = np.load(file)
        return jnp.asarray(stored.view(jnp.dtype(dtype)) if dtype in input_arrays.BITS else stored)


@jax.jit
def _sum(x: jax.Array) -> jax.Array:
    return x.sum()


@functools.cache
def _filler(size: int) -> Callable[[], jax.Array]:
    """Compile a program that returns `size` bytes of NaN.

    The compile takes longer than a round on a GPU, so it must precede timing. It autotunes nothing, so it does not
    write this process's file of choices again.
    """

    def nan_bytes() -> jax.Array:
        return jnp.full((size,), 0xFF, jnp.uint8)  # all bits set is a NaN in every floating type

    options: dict[str, str | bool] = {"xla_gpu_dump_autotune_results_to": ""}
    filler: Callable[[], jax.Array] = jax.jit(nan_bytes).lower().compile(compiler_options=options)
    return filler


@jax.jit
def _largest_difference(values: jax.Array, reference: jax.Array) -> jax.Array:
    return jnp.abs(values.astype(jnp.float64) - reference).max()


@jax.jit
def _largest_differences_by_row(values: jax.Array, reference: jax.Array) -> jax.Array:
    return jnp.abs(values.astype(jnp.float64) - reference).max(-1)


@jax.jit
def _same_bits(x: jax.Array, y: jax.Array) -> jax.Array:
    bits = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize]
    return (jax.lax.bitcast_convert_type(x, bits) == jax.lax.bitcast_convert_type(y, bits)).all()


def _extent(array: jax.Array) -> Extent:
    """Return the first and one-past-last address on the device."""
    start = array.unsafe_buffer_pointer()
    return start, start + array.nbytes
