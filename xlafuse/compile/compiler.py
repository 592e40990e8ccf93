"""Lowering and compiling a function with XLA, for the device of this process or for a GPU or TPU that is not in it.

One `compile` call makes one executable of one variant at one matmul precision, and returns what XLA reports about it.
Flags are passed for each compile; `environment.configure_environment` sets the few that XLA reads from the process's
environment.
"""

import functools
import hashlib
import importlib.util
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypeVar

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np

from xlafuse.compile import _jax_private, variants
from xlafuse.dumps import artifacts
from xlafuse.hlo import provenance
from xlafuse.hlo.gpu_program import Kernel, kernels, parse

MatmulPrecision = Literal["ieee", "tf32", "tf32x3"]
Products = Literal["triton", "cublas"]

# jax's names, checked in the PTX for an H200: "default" makes fp32 products TF32 on jax 0.10.2 and 0.11.2;
# "tensorfloat32" does so only on 0.11.2 (Triton GEMMs of 0.10.2 stay IEEE); "highest" is IEEE on both. None of them
# changes a bf16 or fp16 product. "TF32_TF32_F32_X3" makes an fp32 product three TF32 products on both: one Triton GEMM,
# or three calls of cuBLASLt.
_PRECISION = {"ieee": "highest", "tf32": "default", "tf32x3": "TF32_TF32_F32_X3"}

# Options that choose Triton or cuBLAS for all matrix products that the autotuner would decide. With "triton" these
# include products for which XLA's rules say cuBLAS.
PRODUCTS: dict[Products | None, dict[str, Any]] = {
    None: {}, "triton": {"xla_gpu_triton_gemm_any": True}, "cublas": {"xla_gpu_enable_triton_gemm": False},
}

# The tile of Triton's kernels where a prediction chooses. An H200 chose it for many small products, and cuBLAS for most
# large ones. XLA without its autotuner takes a tile of 16 by 8.
_TRITON = {
    "xla_gpu_override_gemm_autotuner": "block_m: 64 block_n: 64 block_k: 64 num_stages: 3 num_warps: 4 num_ctas: 1"
}

_Compiled = TypeVar("_Compiled")
_loaded_results: Path | None = None
# Options that compile a module to its faster products, by the predictions and the hash of the module's text.
_faster: dict[tuple[Callable[[str], float | None], str], dict[str, Any]] = {}


@dataclass(frozen=True)
class Target:
    """A GPU or a TPU chip that is not in this machine.

    config_text: a GPU's GpuTargetConfigProto as text, from the same series as the running jax (0.10 rejects fields that
        0.11 writes); a TPU's topology of one chip, as libtpu names it ("v5e:1x1").
    autotune_results: results that this GPU recorded (`configure_environment(record_autotune_to=...)`), to be replayed.
        Only the jax version that wrote them can read them (0.10.2 cannot read those of 0.11.2). None: no replay.
    products: "triton" or "cublas" for all matrix products for which the autotuner would choose between them; not
        together with autotune_results. None: where no results cover a module, the faster one by `time_us`.
    time_us: returns the predicted time of a call in µs, given an optimized module's text; None if it has none. Without
        this function, XLA chooses without its autotuner.
    devices: how many of these GPUs the machine has; 1 for a TPU.
    platform: jax's name of the platform. XLA for TPUs does not autotune, so a TPU has no results and no products.
    """

    config_text: str
    autotune_results: Path | None = None
    products: Products | None = None
    time_us: Callable[[str], float | None] | None = None
    devices: int = 1
    platform: Literal["cuda", "tpu"] = "cuda"

    def __post_init__(self) -> None:
        if self.platform == "tpu" and (self.autotune_results or self.products or self.devices != 1):
            raise ValueError(
                "a TPU target is one chip without autotuning results and without a choice of products, got "
                f"{self.devices} devices, results {self.autotune_results}, products {self.products}"
            )


@dataclass(frozen=True)
class Memory:
    """The bytes of device memory for one call, as XLA's buffer assignment plans them."""

    arguments: int
    outputs: int
    temporaries: int


@dataclass(frozen=True)
class Compilation:
    """One executable and what XLA reports about it.

    executable: called like the compiled function, on arrays of this device; None if compiled for a `Target`.
    output_structs: the function's output pytree with `jax.ShapeDtypeStruct` leaves; the backward phase is compiled from
        it.
    computed_structs: the leaves of the output that a call computes and allocates; the others are existing arrays.
    arguments: the paths of the arguments' leaves ("[0]['x']"), in the order of the module's parameters.
    closed_over: (shape, dtype) of closed-over arrays that are parameters of the module, before those of `arguments`.
    leaves: the origin of each leaf of the output: ("computed", index of the module's result), ("argument", index of its
        parameter) or ("constant", 0).
    stablehlo: XLA's input. hlo_text, hlo_proto: the optimized module as text and as a serialized HloModuleProto.
    trace_s, compile_s: seconds to trace and lower in Python, and to compile in XLA.
    kernels: in schedule order.
    unparsed: (line number, text) of lines of hlo_text that were not understood; each may hide a kernel.
    autotuning: the provenance of each kernel's configuration, by kernel name; see `provenance`.
    replay_miss: XLA's message if recorded results were given and do not cover this module, else None.
    """

    executable: Callable[..., Any] | None
    output_structs: Any
    computed_structs: tuple[jax.ShapeDtypeStruct, ...]
    arguments: tuple[str, ...]
    closed_over: tuple[tuple[tuple[int, ...], str], ...]
    leaves: tuple[tuple[str, int], ...]
    stablehlo: str
    hlo_text: str
    hlo_proto: bytes
    trace_s: float
    compile_s: float
    memory: Memory
    kernels: tuple[Kernel, ...]
    unparsed: tuple[tuple[int, str], ...]
    autotuning: dict[str, provenance.Provenance]
    replay_miss: str | None


def compile(
    function: Callable[..., Any],
    args: Sequence[Any],
    *,
    variant: variants.Variant = "default",
    matmul_precision: MatmulPrecision | None = "ieee",
    command_buffers: variants.CommandBuffers = "default",
    target: Target | None = None,
    dump_to: Path | None = None,
    autotune_lock: Callable[[], AbstractContextManager[None]] | None = nullcontext,
    reuses_results: bool = False,
    options: Mapping[str, Any] = MappingProxyType({}),
) -> Compilation:
    """Compile `function(*args)`, args being pytrees of arrays or of `jax.ShapeDtypeStruct`s.

    An argument with a `jax.sharding.NamedSharding` keeps it, so that a program spans the devices of its mesh.
    matmul_precision: of fp32 products, also in the backward phase; None leaves it to the function and jax's config.
        bfloat16 and float16 products accumulate in fp32 on a GPU and compile to the same kernels either way. "ieee"
        changes their autotuning fingerprints, so replay at the precision of the recording. "tf32x3" refuses products of
        other types and a CPU.
    command_buffers: the launches that run from CUDA graphs; see `variants.compiler_options`.
    dump_to: an empty or new folder for this compile's artifacts, named as in `artifacts.ARTIFACTS`.
    autotune_lock: a context manager around a compile that times kernels, so that nothing else uses the GPU meanwhile.
        The reported seconds leave out the wait for it. None: the compile may not time kernels.
    reuses_results: this process loaded earlier autotuning results (`configure_environment(reuse_autotune_from=...)`).
        A compile for which they hold every choice times nothing and takes no lock.
    options: XLA's options for this compile, besides those of the variant.

    An output that is an input, a constant or a duplicate of another output is not computed: the executable returns the
    existing array, while XLA would copy it. A vjp saves many such arrays, and a training step in one program does not
    copy them either.

    Raises AutotuningNeeded if autotune_lock is None and a kernel needs autotuning; variants.FusionNotDisabled if
    variant="unfused" still fused; RuntimeError if this process replayed other autotuning results, since XLA keeps what
    it loaded until the process exits; ValueError for autotuning results of another jax version; and jax's own errors.
    """
    _jax_private.check_version()
    structs = _structs(tuple(args), target)
    with _precision(matmul_precision), _jax_private.having(target_devices(target)):
        started = time.perf_counter()
        function = _fresh(function)
        outputs = _OutputPlan(jax.jit(function).trace(*structs))
        # Unused arguments stay parameters, as in the first trace.
        traced = jax.jit(outputs.computed_only(function), keep_unused=True).trace(*structs)
        lowered = _jax_private.lower(traced, target.platform if target else None)
        trace_s = time.perf_counter() - started

    options = {**variants.compiler_options(variant, command_buffers), **options}
    with artifacts.raw_dump_folder(dump_to) as raw:
        if raw is not None:
            options |= artifacts.dump_options(raw)
        if target is None:
            compiled, compile_s, source = _compile_here(lowered, options, autotune_lock, reuses_results)
            replay_miss = None
        else:
            compiled, compile_s, source, replay_miss = compile_lowered(lowered, options, target)
        hlo_text = compiled.as_text()
        module = parse(hlo_text)
        if raw is not None and dump_to is not None:
            artifacts.keep_artifacts(raw, dump_to, module.name, lowered.as_text(debug_info=True))
    found = tuple(kernels(module))
    if variant == "unfused":
        variants.check_unfused(found)

    closed_over = _jax_private.constant_inputs(traced)
    memory = compiled.memory_analysis()
    return Compilation(
        executable=None if target else outputs.executable(compiled),
        output_structs=outputs.structs(),
        computed_structs=outputs.computed_structs(),
        arguments=tuple(jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(structs)),
        closed_over=closed_over,
        leaves=outputs.leaves(before=len(closed_over)),
        stablehlo=lowered.as_text(),
        hlo_text=hlo_text,
        hlo_proto=_jax_private.optimized_module_proto(compiled),
        trace_s=trace_s,
        compile_s=compile_s,
        memory=Memory(memory.argument_size_in_bytes, memory.output_size_in_bytes, memory.temp_size_in_bytes),
        kernels=found,
        unparsed=tuple(module.unparsed),
        autotuning={kernel.name: provenance.of(kernel, source) for kernel in found},
        replay_miss=replay_miss,
    )


def target_devices(target: Target | None) -> tuple[Any, ...]:
    """Return the devices of a target; none without one."""
    return _jax_private.target_devices(target.config_text, target.devices, target.platform) if target else ()


def target_sharding(target: Target | None) -> jax.sharding.Sharding | None:
    """Return the sharding that places an array on a target's device, or a copy on each. None without a target."""
    match target_devices(target):
        case ():
            return None
        case (device,):
            return jax.sharding.SingleDeviceSharding(device)
        case devices:
            mesh = jax.sharding.Mesh(np.array(devices), ("devices",))
            return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())


def _structs(args: tuple[Any, ...], target: Target | None) -> tuple[Any, ...]:
    sharding = target_sharding(target)

    def struct(x: Any) -> jax.ShapeDtypeStruct:
        own = getattr(x, "sharding", None)
        placed = own if isinstance(own, jax.sharding.NamedSharding) else sharding
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placed)

    return jax.tree.map(struct, args)


def _precision(precision: MatmulPrecision | None) -> Any:
    return nullcontext() if precision is None else jax.default_matmul_precision(_PRECISION[precision])


def _fresh(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function as a new object, because jax caches compiles by object."""

    @functools.wraps(function)
    def fresh(*args: Any) -> Any:
        return function(*args)

    return fresh


_COMPLETE = {"xla_gpu_require_complete_aot_autotune_results": True}  # without it XLA tunes, or guesses without a GPU


class AutotuningNeeded(Exception):
    """XLA would have to time kernels to choose one, which this compile may not do."""


def _compile_here(
    lowered: Any, options: dict[str, Any], autotune_lock: Callable[[], AbstractContextManager[None]] | None,
    reuses_results: bool,
) -> tuple[Any, float, provenance.Source]:
    """Compile for this process's GPU; return (compiled, seconds, source of the autotuning choices)."""
    if reuses_results or autotune_lock is None:
        try:
            return *_timed(lowered, options | _COMPLETE), "replay"
        except jax.errors.JaxRuntimeError as error:  # missing results are tuned below; other errors occur again
            if autotune_lock is None:
                raise AutotuningNeeded(str(error)) from error
    with autotune_lock():
        return *_timed(lowered, options), "device"


def compile_lowered(
    lowered: Any, options: dict[str, Any], target: Target | None
) -> tuple[Any, float, provenance.Source, str | None]:
    """Return (compiled, seconds, source of the choices, replay miss).

    If recorded results do not cover the module, it is compiled without.
    """
    if target is None:
        return *_timed(lowered, options), "device", None
    _check_results(target.autotune_results)
    if options.keys() & {*PRODUCTS["cublas"], *_TRITON}:  # the caller chose
        target = replace(target, time_us=None)
    missed = None
    if target.autotune_results is not None:
        options = options | {"xla_gpu_load_autotune_results_from": str(target.autotune_results)}
        try:
            return *_timed(lowered, options | _COMPLETE), "replay", None
        except jax.errors.JaxRuntimeError as error:
            if "Failed to parse autotune results" in str(error):
                raise ValueError(
                    "autotune results are read only by the jax version that wrote them; "
                    f"{target.autotune_results} is not jax {jax.__version__}'s. Record them with this version, "
                    "or give none"
                ) from error
            if "No cached config found" not in str(error):
                raise
            missed = str(error)
    undumped = {name: value for name, value in options.items() if not name.startswith("xla_dump_")}

    def made(products: dict[str, Any], dump: bool) -> tuple[Any, float]:
        return _timed(lowered, (options if dump else undumped) | products)

    (compiled, seconds), source = with_choices(made, lambda made: made[0].as_text(), lowered.as_text(), target)
    return compiled, seconds, source, missed


def with_choices(
    compiled: Callable[[dict[str, Any], bool], _Compiled], text: Callable[[_Compiled], str], module: str, target: Target
) -> tuple[_Compiled, provenance.Source]:
    """Return a module's compile with options for its products, and the source of the choice.

    compiled: compiles with XLA's options, and dumps if asked to. text: the optimized module of a compile. module: in
    StableHLO. The same module gets the same options again, so that compiles of it with other flags can be compared.
    """
    time_us = target.time_us
    if target.platform == "tpu":
        return compiled({}, True), "cost model"
    if target.products or time_us is None or "dot_general" not in module:
        return compiled(PRODUCTS[target.products], True), "nothing"
    key, cublas = (time_us, hashlib.sha256(module.encode()).hexdigest()), PRODUCTS["cublas"]
    if key in _faster:
        return compiled(_faster[key], True), "prediction"
    # No Triton kernel of XLA for 8-bit floats was measured.
    of_triton = math.inf if "f8E" in module else _time_of(compiled, text, time_us)
    made = compiled(cublas, True)
    of_cublas = time_us(text(made))
    if of_cublas is not None and of_triton < of_cublas:
        _faster[key] = _TRITON
        return compiled(_TRITON, True), "prediction"
    _faster[key] = cublas
    return made, "prediction"


def _time_of(
    compiled: Callable[[dict[str, Any], bool], _Compiled], text: Callable[[_Compiled], str],
    time_us: Callable[[str], float | None],
) -> float:
    """Return the predicted time with Triton's products; infinity without one, and where Triton does not have them."""
    try:
        time = time_us(text(compiled(_TRITON, False)))
    except jax.errors.JaxRuntimeError:
        return math.inf
    return math.inf if time is None else time


def _check_plugin(error: Exception) -> None:
    """Raise RuntimeError where the module calls what jax-cuda13-plugin brings, and this is not installed."""
    calls_it = "No FFI handler registered" in str(error) or "mosaic_gpu" in str(error)
    if calls_it and importlib.util.find_spec("jax_cuda13_plugin") is None:
        raise RuntimeError(
            "the function calls a callback, linear algebra or a Pallas kernel, which needs jax-cuda13-plugin: "
            f'pip install "jax-cuda13-plugin=={jax.__version__}"'
        ) from error


def _timed(lowered: Any, options: dict[str, Any]) -> tuple[Any, float]:
    started = time.perf_counter()
    try:
        compiled = lowered.compile(compiler_options=options)
    except jax.errors.JaxRuntimeError as error:
        _check_plugin(error)
        raise
    return compiled, time.perf_counter() - started


def _check_results(results: Path | None) -> None:
    """Raise RuntimeError for a second set of results: XLA loads one file per process and keeps it."""
    global _loaded_results
    results = results.resolve() if results else None
    if _loaded_results is not None and results != _loaded_results:
        raise RuntimeError(
            "one process replays one set of autotune results, for XLA keeps what it loaded; this one holds "
            f"{_loaded_results} and was asked for {results}. Compile in another process"
        )
    _loaded_results = results


def _struct(aval: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)


class _OutputPlan:
    """The output leaves that must be computed, and the origin of the others."""

    def __init__(self, traced: Any) -> None:
        jaxpr = traced.jaxpr.jaxpr
        arguments = {variable: position for position, variable in enumerate(jaxpr.invars)}
        self._avals: list[Any] = [variable.aval for variable in jaxpr.outvars]
        computed: dict[Any, int] = {}
        # Positions of the leaves to compute, without duplicates.
        self._positions: list[int] = []
        # For each leaf: ("computed", index), ("argument", index) or ("constant", array).
        self._sources: list[tuple[str, Any]] = []
        for position, variable in enumerate(jaxpr.outvars):
            if isinstance(variable, jax.extend.core.Literal):
                self._sources.append(("constant", jnp.asarray(variable.val, self._avals[position].dtype)))
            elif variable in arguments:
                self._sources.append(("argument", arguments[variable]))
            else:
                if variable not in computed:
                    computed[variable] = len(self._positions)
                    self._positions.append(position)
                self._sources.append(("computed", computed[variable]))
        self._tree: Any = None

    def computed_only(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def computed_only(*args: Any) -> list[Any]:
            leaves, self._tree = jax.tree.flatten(function(*args))
            return [leaves[position] for position in self._positions]

        return computed_only

    def structs(self) -> Any:
        return jax.tree.unflatten(self._tree, [_struct(aval) for aval in self._avals])

    def computed_structs(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        return tuple(_struct(self._avals[position]) for position in self._positions)

    def leaves(self, *, before: int) -> tuple[tuple[str, int], ...]:
        """Return the origin of each leaf. `before`: the number of parameters before the arguments."""
        first = {"argument": before, "computed": 0}
        return tuple((kind, first[kind] + at if kind in first else 0) for kind, at in self._sources)

    def executable(self, compiled: Any) -> Callable[..., Any]:
        tree, sources = self._tree, self._sources

        def executable(*args: Any) -> Any:
            computed = compiled(*args)
            arguments = jax.tree.leaves(args)
            origin = {"computed": computed, "argument": arguments}
            return tree.unflatten(at if kind == "constant" else origin[kind][at] for kind, at in sources)

        return executable
