"""All uses of jax API without a stability promise; versions.py lists the tested series."""

import contextlib
import functools
import importlib
import importlib.util
import types
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import jax
import jax.extend.backend
import jax.numpy as jnp
import numpy as np
from jax._src import compiler, core, xla_bridge
from jax._src.cudnn import fused_attention_stablehlo as cudnn
from jax._src.interpreters import mlir
from jax._src.lib import _jax
from jax._src.lib.mlir import ir
from jax._src.sharding_impls import UNSPECIFIED
from jax._src.state import primitives as state
from jax.experimental import topologies
from jaxlib import _hlo  # type: ignore[attr-defined]

from xlafuse import versions


def check_version() -> None:
    """Raise RuntimeError unless the calls below were tested with this series of jax."""
    if ".".join(jax.__version__.split(".")[:2]) not in versions.JAX:
        raise RuntimeError(
            f"xlafuse reads XLA's output through jax {', '.join(versions.JAX)}; this is jax {jax.__version__}. "
            "Install one of those"
        )


@functools.cache
def target_devices(config_text: str, count: int = 1, platform: str = "cuda") -> tuple[Any, ...]:
    """Return devices of one host: code can be compiled for them, but not run.

    config_text: a GPU's GpuTargetConfigProto; a TPU's topology of one chip ("v5e:1x1"), which needs libtpu.
    """
    check_version()
    if platform == "tpu":
        if importlib.util.find_spec("libtpu") is None:
            raise RuntimeError(f'XLA compiles for TPUs with libtpu: pip install "jax[tpu]=={jax.__version__}"')
        found = topologies.get_topology_desc(
            platform="tpu", topology_name=config_text, chips_per_host_bounds=[1, 1, 1]
        )
        return tuple(found.devices)
    topology = topologies.get_topology_desc(platform="cuda", topology=f"1x1x{count}", target_config=config_text)
    return tuple(topology.devices)


@contextlib.contextmanager
def having(devices: Sequence[Any]) -> Iterator[None]:
    """Trace and lower as on a machine that has these devices. Without any, as on this machine.

    Callbacks to Python ask for this process's client of the device, Pallas for its first device, and meshes for all.
    """
    if not devices:
        yield
        return
    device = devices[0]
    platforms = ("tpu",) if device.platform == "tpu" else ("cuda", "gpu")
    get_backend, known_devices = mlir.ModuleContext.get_backend, xla_bridge.devices
    default_devices = xla_bridge.local_devices()  # jax puts constants on the first, before xla_bridge.devices changes

    def all_devices(backend: Any = None) -> list[Any]:
        return list(devices) if backend in (None, *platforms) else known_devices(backend)

    def device_count(backend: Any = None) -> int:
        return len(all_devices(backend))

    def client(context: Any, *args: Any, **kwargs: Any) -> Any:
        return device.client if context.platforms == platforms[:1] else get_backend(context, *args, **kwargs)

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(mlir.ModuleContext, "get_backend", client))
        stack.enter_context(mock.patch.object(jax.extend.backend, "get_default_device", lambda: device))
        for module in (jax, xla_bridge):
            stack.enter_context(mock.patch.object(module, "devices", all_devices))
            stack.enter_context(mock.patch.object(module, "device_count", device_count))
        stack.enter_context(mock.patch.object(jax, "local_devices", lambda *args, **kwargs: list(devices)))
        stack.enter_context(mock.patch.object(xla_bridge, "local_devices", lambda *args, **kwargs: default_devices))
        if importlib.util.find_spec("jax._src.pallas.triton.gpu_info"):  # jax 0.11
            gpu_info = importlib.import_module("jax._src.pallas.triton.gpu_info")
            asked = types.SimpleNamespace(get_default_device=lambda: device)
            stack.enter_context(mock.patch.object(gpu_info, "pxla", asked))
        yield


@contextlib.contextmanager
def interpreted_pallas(**parameters: Any) -> Iterator[None]:
    """Run Pallas kernels of Mosaic GPU in jax's interpreter, on a CPU. parameters: of plgpu.InterpretGPUParams.

    The interpreter of jax 0.11.2 lacks products whose left operand is in registers, stores to an accumulator, and
    copies that add to memory. They are supplied here.
    """
    check_version()
    plgpu: Any = importlib.import_module("jax.experimental.pallas.mosaic_gpu")  # jax 0.10 has no interpreter
    private = "jax._src.pallas.mosaic_gpu"
    interpreter = importlib.import_module(f"{private}.interpret.jaxpr_interpret").JaxprInterpreter
    callbacks: Any = importlib.import_module(f"{private}.interpret.gpu_callbacks")
    store = importlib.import_module(f"{private}.primitives").wgmma_accumulator_store_p
    interpret, product, swap, copy = (
        interpreter.interpret, callbacks.wgmma, callbacks._swap, callbacks.copy_smem_to_gmem
    )

    def with_stores(self: Any, jaxpr: Any, *args: Any) -> Any:
        exchange = {"primitive": state.swap_p, "params": {"tree": jax.tree.structure(())}}
        eqns = [e.replace(**exchange) if e.primitive is store else e for e in jaxpr.eqns]
        return interpret(self, jaxpr.replace(eqns=eqns), *args)

    class Buffer:
        """A part of the interpreter's memory, as an operand of a callback names it."""

        def __init__(self, operands: Any, name: str) -> None:
            self.memory, self.thread = callbacks._get_shared_memory(), operands["thread"]
            self.info = callbacks.memory.GPULoggingInfo(
                operands["mesh_location"], self.thread, operands["source_info"]
            )
            self.key = callbacks.HostAllocationKey.from_array(operands[f"{name}_allocation_key_as_array"])
            transforms = callbacks._remove_noop_transforms(operands[f"{name}_transforms"])
            self.place = self.memory.access(self.key, jax.tree.map(int, transforms))

        def load(self) -> Any:
            return self.memory.get_buffer_content(self.key, self.place, self.thread, logging_info=self.info)[0]

        def store(self, value: Any) -> None:
            self.memory.store_buffer_content(self.key, self.place, value, self.thread, logging_info=self.info)

    @callbacks.fail_on_exception
    def with_registers(**operands: Any) -> Any:
        left = operands["a_allocation_key_as_array"]
        if not jnp.issubdtype(left.dtype, jnp.floating):
            return product(**operands)
        total = Buffer(operands, "acc")
        total.store(total.load() + np.matmul(left, Buffer(operands, "b").load(), dtype=np.float32))
        return operands["token"]

    @callbacks.fail_on_exception
    def with_sums(*, reduction_op: Any, **operands: Any) -> Any:
        """Copy from shared memory. To add, add what is in memory first; in-between nothing reads shared memory."""
        if reduction_op == "add":
            added, old = Buffer(operands, "src"), Buffer(operands, "dst").load()
            value = added.load()
            if old is not None:  # only the part within the array's bounds
                value[tuple(map(slice, old.shape))] += old
            added.store(value)
        return copy(reduction_op=None, **operands)

    @callbacks.fail_on_exception
    def without_race(
        token: Any, at: Any, thread: Any, place: Any, indices: Any, value: Any, *mask: Any, **rest: Any
    ) -> Any:
        """Exchange a value. Registers are no shared memory, so the detector of races need not know."""
        if callbacks.HostAllocationKey.from_array(place).memory_space_id != registers:
            return swap(token, at, thread, place, indices, value, *mask, **rest)
        operands = {"mesh_location": at, "thread": thread, **rest}
        Buffer(operands | {"_allocation_key_as_array": place, "_transforms": indices}, "").store(np.array(value))
        return token, value

    registers = callbacks.memory.get_memory_space_idx(plgpu.REGS)
    supplied = {"wgmma": with_registers, "copy_smem_to_gmem": with_sums, "_swap": without_race}
    with (
        mock.patch.object(interpreter, "interpret", with_stores),
        mock.patch.multiple(callbacks, **supplied),
        plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(**parameters)),
    ):
        yield


def lower(traced: Any, platform: str | None) -> Any:
    """Lower for a target's platform, or for this process's device (None).

    A target's module calls Python, but holds no function to call: XLA's client of an absent device takes none.
    """
    if platform is None:
        return traced.lower()
    lowered = traced.lower(lowering_platforms=(platform,))
    lowered._lowering.compile_args["host_callbacks"] = []
    return lowered


def device_count(lowered: Any) -> int:
    """Return the devices that a lowered function runs on."""
    return int(lowered._lowering.compile_args["num_devices"])


def optimized_module_proto(compiled: jax.stages.Compiled) -> bytes:
    """Return the optimized module as a serialized HloModuleProto."""
    check_version()
    executable: Any = compiled.runtime_executable()
    (module,) = executable.hlo_modules()
    return module.as_serialized_hlo_module_proto()


def compile_stablehlo(text: str, options: dict[str, Any], target: Any) -> str:
    """Compile StableHLO text for a target's device, or the default device (None); return the optimized HLO.

    jax has no public API for this: `Lowered.compile` needs the trace that produced the StableHLO.
    """
    check_version()
    executable = _compiled(text, options, jax.devices()[0] if target is None else target)
    (optimized,) = executable.hlo_modules()
    return optimized.to_string()


def hlo_text(module: bytes) -> str:
    """Return a serialized HloModuleProto as text, with all literals."""
    options = _hlo.HloPrintOptions()
    options.print_large_constants = True
    return str(_hlo.HloModule.from_serialized_hlo_module_proto(module).to_string(options))


def run_on_cpu(hlo_text: str, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return the results of HLO without fusions for these inputs."""
    check_version()
    module = _hlo.hlo_module_from_text(hlo_text)
    stablehlo = _jax.mlir.hlo_to_stablehlo(module.as_serialized_hlo_module_proto())
    cpu = jax.devices("cpu")[0]
    executable = _compiled(stablehlo, {"xla_allow_excess_precision": False}, cpu)
    with jax.enable_x64(True):
        results = executable.execute_sharded([jax.device_put(value, cpu) for value in inputs])
    return [np.asarray(shards[0]) for shards in results.disassemble_into_single_device_arrays()]


def _compiled(text: str | bytes, options: dict[str, Any], device: Any) -> Any:
    with mlir.make_ir_context():
        module = ir.Module.parse(text)
        assignment = np.array([[device.id]])
        overrides = compiler.get_compile_options(
            num_replicas=1, num_partitions=1, device_assignment=assignment, env_options_overrides=options,
            backend=device.client,
        )
        devices = _jax.DeviceList((device,))
        return compiler.backend_compile_and_load(device.client, module, devices, overrides, [])


def cudnn_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, lengths: jax.Array | None = None, mask: jax.Array | None = None
) -> jax.Array:
    """Return cuDNN's softmax(q k^T / sqrt(head_dim)) v over the first `lengths` keys, or those where `mask` is true.

    q is [batch, heads, queries, head_dim]; k and v are [batch, kv_heads, keys, head_dim]; mask is [batch, 1, queries,
    keys]. jax.nn.dot_product_attention does the same, but only for arrays whose heads axis comes after the keys.
    """
    check_version()
    scale = q.shape[-1] ** -0.5
    if lengths is None:
        return cudnn.dot_product_attention(q, k, v, mask=mask, scale=scale, qkv_layout="BNTH")
    queries = jnp.full(len(q), q.shape[2], jnp.int32)
    return cudnn.dot_product_attention(
        q, k, v, mask=mask, q_seqlen=queries, kv_seqlen=lengths, scale=scale, mask_type=cudnn.MaskType.PADDING,
        qkv_layout="BNTH",
    )


def constant_inputs(traced: jax.stages.Traced) -> tuple[tuple[tuple[int, ...], str], ...]:
    """Return (shape, dtype) of the closed-over arrays that become the lowered module's first parameters.

    `environment.configure_environment(constants_as_inputs=True)` makes jax do so.
    """
    check_version()
    held = core.jaxpr_const_args(traced.jaxpr.jaxpr)
    return tuple((tuple(aval.shape), str(aval.dtype)) for _, aval in held)


def jit_options(jitted: Any) -> tuple[Any, dict[str, Any]]:
    """Return (function, options) such that `jax.jit(function, **options)` equals `jitted`; pickling loses the options.
    """
    check_version()
    info = jitted._jit_info
    shardings = {
        f"{side}_shardings": jax.tree.unflatten(getattr(info, f"{side}_shardings_treedef"), leaves)
        for side in ("in", "out") if (leaves := getattr(info, f"{side}_shardings_leaves")) != (UNSPECIFIED,)
    }
    names = ("static_argnums", "static_argnames", "donate_argnums", "donate_argnames", "keep_unused")
    options = {name: getattr(info, name) for name in names} | shardings
    return jitted._fun, options | {"compiler_options": dict(info.compiler_options_kvs) or None}
