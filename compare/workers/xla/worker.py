"""JAX's side: blocks compiled by XLA, run on this process's device, or compiled for a GPU that is not there."""

from __future__ import annotations

import functools
import math
import os
import platform
import re
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from xlafuse.compile.environment import configure_environment, gpu_present

from ... import targets

_PACK = os.environ.get("XLAFUSE_TARGET_PACK")  # where a run on a GPU leaves what a machine without it will need
_HAS_GPU = gpu_present()
# XLA rewrites its file with what this process knows: a restarted worker gets one of its own, joined when the run ends.
_AUTOTUNE = (
    Path(_PACK) / "xla" / f"autotune-{version('jax')}.{os.getpid()}.textproto" if _PACK and _HAS_GPU else None
)
# What this run's earlier processes chose, joined by the orchestrator while none of them was running.
_CHOSEN = targets.autotune_results(Path(_PACK) / "xla", version("jax")) if _AUTOTUNE and _PACK else None
configure_environment(deviceless=not _HAS_GPU, record_autotune_to=_AUTOTUNE, reuse_autotune_from=_CHOSEN)

import jax  # noqa: E402  (XLA reads its flags when jax is imported)
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

from xlafuse.compile import compiler, directions, variants  # noqa: E402
from xlafuse.dumps import artifacts  # noqa: E402

from ...base import host  # noqa: E402
from ...base.paths import PROJECT  # noqa: E402
from ...base.worker_protocol import NotAutotuned, Skip  # noqa: E402
from ...graph import store  # noqa: E402
from ...graph.analyse.summary import portable_lines  # noqa: E402
from ...graph.model import FusionGraph  # noqa: E402
from ...measure import ptx_launch  # noqa: E402
from ...measure.clock import Clock, CuptiClock, cupti_missing  # noqa: E402
from ...measure.measurement import Arrays, Extent, Peak, Program, lies_within  # noqa: E402
from ...numerics import input_arrays as arrays  # noqa: E402
from ...spec.blocks import BLOCKS  # noqa: E402
from ...spec.case import Case  # noqa: E402
from ...spec.implementation import Implementation  # noqa: E402
from .. import autotune_lock  # noqa: E402
from ..service import Service, require  # noqa: E402
from . import fusion_graph, triton_calls  # noqa: E402

# HLO names source files relative to the project, or to the packages of its environment.
jax.config.update("jax_hlo_source_file_canonicalization_regex", rf"^(?:{re.escape(str(PROJECT))}|.*/site-packages)/")

_FLUSH_BYTES = 256 << 20  # four times an H200's L2


def methods() -> dict[str, Callable[..., Any]]:
    side = XlaSide()
    return Service(side).methods() | {"compile": side.compile_for_target}


class XlaSide:
    """Implements compare.workers.service.Framework."""

    backend = "xla"

    def __init__(self) -> None:
        self._device = jax.devices()[0]
        self.device = self._device.device_kind if _HAS_GPU else "cpu"
        self._case_folder: Path | None = None
        self._cache: dict[Any, Any] = {}
        self._unchosen: set[tuple[str, str, str]] = set()  # what was looked for among known choices in vain
        self._flush_buffer: Any = None

    def environment(self) -> dict[str, Any]:
        packages = ("jax", "jaxlib", "jax-cuda13-pjrt", "jax-cuda13-plugin", "flax")
        memory = {"memory_bytes": ptx_launch.total_memory()} if _HAS_GPU else {}
        return {"python": platform.python_version(), "device": self.device, **memory, **host.versions(packages)}

    def clock(self) -> Clock | None:
        return CuptiClock() if _HAS_GPU and not cupti_missing() else None

    def build(
        self, case: Case, implementation: Implementation, folder: Path, dumps: Path, tune: bool = True
    ) -> Program:
        if _HAS_GPU and _CHOSEN is None and not tune:
            raise NotAutotuned("nothing that XLA chose is known")
        inputs, cotangents = self.inputs(folder, case), self.cotangents(folder, case)
        try:
            halves = self._compile(case, implementation, inputs, cotangents, dumps, target=None, tune=tune)
        except compiler.AutotuningNeeded as problem:
            raise NotAutotuned(str(problem)) from problem
        program = _program(case, halves, dumps)
        program.graph = _graph(halves, dumps, name=implementation.name, target="")
        program.variants = _variants(
            program.command_buffers or {},
            lambda setting: self._compile_again(case, implementation, (inputs, cotangents), setting),
        )
        return program

    def _compile_again(
        self, case: Case, implementation: Implementation, arrays: tuple[Arrays, Arrays],
        command_buffers: variants.CommandBuffers,
    ) -> Program:
        """The block's other program, from the same choices: XLA remembers for the life of a process what it tuned."""
        with tempfile.TemporaryDirectory(prefix="xlafuse-") as scratch:
            halves = self._compile(
                case, implementation, *arrays, Path(scratch), target=None, command_buffers=command_buffers
            )
            program = _program(case, halves, Path(scratch))
        inside = sum(inside for inside, _ in (program.command_buffers or {}).values())
        if bool(inside) != (command_buffers == "all"):
            raise RuntimeError(f"{command_buffers} of its launches were to be in command buffers; {inside} are")
        return program

    def compile_for_target(
        self, case: dict[str, Any], implementation: str, target: str, dumps: str
    ) -> dict[str, Any]:
        """Compile for a target pack; nothing is run."""
        spec = Case.from_json(case)
        block = BLOCKS[spec.block]
        require(block.implementation(implementation))
        inputs, cotangents = (
            {t.name: jax.ShapeDtypeStruct(t.shape(spec.sizes), jnp.dtype(t.dtype_in(spec))) for t in tensors}
            for tensors in (block.inputs, block.outputs)
        )
        if spec.direction == "joint":
            inputs = block.joined(inputs, cotangents)
        pack = targets.load(target)
        config, results = pack.xla_config(version("jax")), pack.xla_autotune_results(version("jax"))
        halves = self._compile(
            spec, block.implementation(implementation), inputs, cotangents, Path(dumps),
            target=compiler.Target(config, results),
        )
        graph = _graph(halves, Path(dumps), name=implementation, target=target)
        return {"compile_s": sum(half.compile_s for half in halves.values()), "graph": store.to_json(graph)}

    def _compile(
        self, case: Case, implementation: Implementation, inputs: Arrays, cotangents: Arrays, dumps: Path,
        target: compiler.Target | None, command_buffers: variants.CommandBuffers = "default", tune: bool = True,
    ) -> dict[str, compiler.Compilation]:
        attributes = BLOCKS[case.block].attributes_of(case)
        if implementation.compiler == "xla-triton":
            apply = triton_calls.launching(implementation.target, case.precision)
        else:
            apply = implementation.load()
        compile_half = functools.partial(
            self._compile_half, case, implementation, dumps, target=target, command_buffers=command_buffers, tune=tune
        )
        if case.direction == "fwd":
            return {"forward": compile_half("forward", directions.forward(apply, attributes), [inputs])}
        if case.direction == "joint":
            step = directions.joint(apply, attributes, [t.name for t in BLOCKS[case.block].outputs])
            return {"forward": compile_half("forward", step, [inputs])}
        recompute = implementation.compiler == "xla-remat"
        save, differentiate = directions.train_phases(apply, attributes, recompute=recompute)
        forward = compile_half("forward", save, [inputs])
        residuals = forward.output_structs[1]
        backward = compile_half("backward", differentiate, [residuals, cotangents])
        return {"forward": forward, "backward": backward}

    def _compile_half(
        self, case: Case, implementation: Implementation, dumps: Path, part: str, function: Callable[..., Any],
        arguments: list[Any], *, target: compiler.Target | None, command_buffers: variants.CommandBuffers, tune: bool,
    ) -> compiler.Compilation:
        name = case.id, implementation.name, part
        try:
            return compiler.compile(
                function, arguments, variant="unfused" if implementation.compiler == "xla-unfused" else "default",
                matmul_precision="tf32" if case.precision == "tf32" else "ieee", command_buffers=command_buffers,
                target=target, dump_to=dumps / part, autotune_lock=autotune_lock.held if tune else None,
                reuses_results=_CHOSEN is not None and name not in self._unchosen,
            )
        except compiler.AutotuningNeeded:
            self._unchosen.add(name)
            raise

    # What compare.measure.measurement asks of a framework.

    def inputs(self, folder: Path, case: Case) -> Arrays:
        block = BLOCKS[case.block]
        own = {t.name: self._stored(folder, "input", t.name, t.dtype_in(case)) for t in block.inputs}
        return block.joined(own, self._all_cotangents(folder, case)) if case.direction == "joint" else own

    def cotangents(self, folder: Path, case: Case) -> Arrays:
        return self._all_cotangents(folder, case) if "backward" in case.parts else {}

    def _all_cotangents(self, folder: Path, case: Case) -> Arrays:
        if not case.differentiates:
            return {}
        outputs = BLOCKS[case.block].outputs
        return {t.name: self._stored(folder, "cotangent", t.name, t.dtype_in(case)) for t in outputs}

    def changed(self, inputs: Arrays, folder: Path, case: Case) -> list[str]:
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

    def poisoned_allocations(self, program: Program) -> AbstractContextManager[Any]:
        return nullcontext()  # XLA allocates inside the runtime; `poison` covers it on a GPU

    def poison(self, program: Program, part: str) -> list[Extent]:
        """Allocate what the call will, fill it with NaN bits and give it back: XLA's allocator hands it out again."""
        blocks = [_filler(size)() for size in program.allocations[part]]
        jax.block_until_ready(blocks)
        return [_extent(block) for block in blocks]

    def was_poisoned(self, poisoned: list[Extent], results: Arrays) -> bool:
        return all(lies_within(_extent(array), poisoned) for array in results.values())

    def variant(
        self, program: Program, mode: str, inputs: Arrays, cotangents: Arrays
    ) -> AbstractContextManager[Program | None]:
        if program.command_buffers is None:
            raise Skip("XLA's dump does not list its thunks, so which of them are in command buffers is not known")
        compiled = program.variants.get(mode)
        return nullcontext(compiled() if compiled else None)

    def flush_cache(self) -> None:
        if self._flush_buffer is None:
            self._flush_buffer = jnp.ones(_FLUSH_BYTES // 4, jnp.float32)
        _sum(self._flush_buffer).block_until_ready()

    def synchronize(self, results: Any = None) -> None:
        jax.block_until_ready(results)

    def peak_memory(self, program: Program, part: str, call: Callable[[], Any]) -> Peak:
        planned = sum(program.allocations[part])
        return Peak(None, planned, "XLA's allocator never forgets its peak, so the number is the compiler's plan")

    def needs_restart(self, kept: int) -> bool:
        if not _HAS_GPU:
            return False
        found = self._device.memory_stats() or {}
        return max(found.get("pool_bytes", 0), found.get("bytes_in_use", 0)) > kept

    def give_back(self, *, idle: bool) -> None:
        """XLA's allocator keeps what it has."""
        if idle:
            self._case_folder, self._cache = None, {}

    def written_late(self, program: Program, part: str, call: Callable[[], Arrays]) -> list[str]:
        call()
        return []  # an array carries the event after which it is there, and the runtime waits for it

    def device_works(self) -> bool:
        try:
            jax.block_until_ready(jnp.zeros((), jnp.float32) + 1)
        except RuntimeError:
            return False
        return True

    def _stored(self, folder: Path, role: str, name: str, dtype: str = "", copy: str = "live") -> jax.Array:
        if folder.parent != self._case_folder:  # a new case: the last one's arrays are not needed again
            self._case_folder, self._cache = folder.parent, {}
        key = (folder, role, name, copy)
        if key not in self._cache:
            stored = np.load(arrays.path_of(folder, role, name))
            self._cache[key] = jnp.asarray(stored.view(jnp.dtype(dtype)) if dtype in arrays.BITS else stored)
        return self._cache[key]


@jax.jit
def _sum(x: jax.Array) -> jax.Array:
    return x.sum()


@functools.cache
def _filler(size: int) -> Callable[[], jax.Array]:
    """Gives so many bytes of NaN; compiled before it is called, which on a GPU takes longer than a round does. As it
    chooses nothing, what this process has chosen is not written to its file once more."""

    def nan_bytes() -> jax.Array:
        return jnp.full((size,), 0xFF, jnp.uint8)  # all bits set is a NaN in every floating type

    options: dict[str, str | bool] = {"xla_gpu_dump_autotune_results_to": ""}
    filler: Callable[[], jax.Array] = jax.jit(nan_bytes).lower().compile(compiler_options=options)
    return filler


@jax.jit
def _largest_difference(values: jax.Array, reference: jax.Array) -> jax.Array:
    return jnp.abs(values.astype(jnp.float64) - reference).max()


@jax.jit
def _same_bits(x: jax.Array, y: jax.Array) -> jax.Array:
    bits = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize]
    return (jax.lax.bitcast_convert_type(x, bits) == jax.lax.bitcast_convert_type(y, bits)).all()


def _extent(array: jax.Array) -> Extent:
    """First and one-past-last address on the device."""
    start = array.unsafe_buffer_pointer()
    return start, start + array.nbytes


def _program(case: Case, halves: dict[str, compiler.Compilation], dumps: Path) -> Program:
    """What was compiled, to be called; its fusion graph and its variants are not in it."""
    forward = _executable(halves["forward"])
    found = {part: artifacts.command_buffer_launches(dumps / part) for part in halves} if _HAS_GPU else {}
    buffers = {part: counts for part, counts in found.items() if counts}
    return Program(
        forward=forward if "backward" in halves else lambda inputs: (forward(inputs), None),
        backward=_executable(halves["backward"]) if "backward" in halves else None,
        compile_s=sum(half.compile_s for half in halves.values()),
        graph=None,
        allocations={part: _allocations(half) for part, half in halves.items()},
        command_buffers=buffers if len(buffers) == len(halves) else None,
    )


def _variants(
    buffers: dict[str, tuple[int, int]], compile_with: Callable[[variants.CommandBuffers], Program]
) -> dict[str, Callable[[], Program]]:
    """What a program with so many of its launches in command buffers is not already; each compiled when first asked."""
    found: dict[str, Callable[[], Program]] = {}
    if any(inside < total for inside, total in buffers.values()):
        found["graph"] = functools.cache(lambda: compile_with("all"))
    if any(inside for inside, _ in buffers.values()):
        found["launches"] = functools.cache(lambda: compile_with("none"))
    return found


def _allocations(half: compiler.Compilation) -> list[int]:
    """Bytes of the buffers that one call allocates: each output, and the temporaries as one block."""
    outputs = [math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in half.computed_structs]
    return [size for size in [*outputs, half.memory.temporaries] if size]


def _graph(halves: dict[str, compiler.Compilation], dumps: Path, *, name: str, target: str) -> FusionGraph:
    versions = host.installed("jax", "jaxlib")
    if "backward" in halves:
        forward = halves["forward"]
        outputs = len(jax.tree.leaves(forward.output_structs[0]))
        graph = fusion_graph.of_halves(
            forward, halves["backward"], dumps, outputs=outputs, target=target, versions=versions
        )
    else:
        graph, _ = fusion_graph.of_module(halves["forward"], dumps / "forward", target=target, versions=versions)
    return replace(portable_lines(graph), name=name)


def _executable(half: compiler.Compilation) -> Callable[..., Any]:
    assert half.executable is not None, "compiled for a target, not for this device"
    return half.executable
