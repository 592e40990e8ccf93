"""All uses of jax API without a stability promise; versions.py lists the tested series."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import compiler, core
from jax._src.cudnn import fused_attention_stablehlo as cudnn
from jax._src.interpreters import mlir
from jax._src.lib import _jax
from jax._src.lib.mlir import ir
from jax.experimental import topologies

from xlafuse import versions


def check_version() -> None:
    """Raise RuntimeError unless the calls below were tested with this series of jax."""
    if ".".join(jax.__version__.split(".")[:2]) not in versions.JAX:
        raise RuntimeError(
            f"xlafuse reads XLA's output through jax {', '.join(versions.JAX)}; this is jax {jax.__version__}. "
            "Install one of those"
        )


@functools.cache
def target_device(config_text: str) -> Any:
    """Return a device made from a GpuTargetConfigProto: code can be compiled for it, but not run."""
    check_version()
    topology = topologies.get_topology_desc(platform="cuda", topology="1x1x1", target_config=config_text)
    return topology.devices[0]


def optimized_module_proto(compiled: jax.stages.Compiled) -> bytes:
    """Return the optimized module as a serialized HloModuleProto."""
    check_version()
    executable: Any = compiled.runtime_executable()
    (module,) = executable.hlo_modules()
    return module.as_serialized_hlo_module_proto()


def compile_stablehlo(text: str, options: dict[str, Any], config_text: str | None) -> str:
    """Compile StableHLO text for a target's config or the default device; return the optimized HLO.

    jax has no public API for this: `Lowered.compile` needs the trace that produced the StableHLO.
    """
    check_version()
    device = target_device(config_text) if config_text else jax.devices()[0]
    with mlir.make_ir_context():
        module = ir.Module.parse(text)
        assignment = np.array([[0 if config_text else device.id]])
        overrides = compiler.get_compile_options(
            num_replicas=1, num_partitions=1, device_assignment=assignment, env_options_overrides=options,
            backend=device.client,
        )
        devices = _jax.DeviceList((device,))
        executable: Any = compiler.backend_compile_and_load(device.client, module, devices, overrides, [])
    (optimized,) = executable.hlo_modules()
    return optimized.to_string()


def cudnn_attention(q: jax.Array, k: jax.Array, v: jax.Array, lengths: jax.Array) -> jax.Array:
    """Return cuDNN's softmax(q k^T / sqrt(head_dim)) v over the first `lengths` keys.

    q is [batch, heads, queries, head_dim]; k and v are [batch, kv_heads, keys, head_dim]. jax.nn.dot_product_attention
    does the same, but only for arrays whose heads axis comes after the keys.
    """
    check_version()
    queries = jnp.full(len(q), q.shape[2], jnp.int32)
    return cudnn.dot_product_attention(
        q, k, v, q_seqlen=queries, kv_seqlen=lengths, scale=q.shape[-1] ** -0.5, mask_type=cudnn.MaskType.PADDING,
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

    Raises ValueError for a function jitted with shardings, which name devices of this process.
    """
    check_version()
    info = jitted._jit_info
    if info.user_specified_in_shardings:
        raise ValueError("it is jitted with in_shardings, which name this process's devices; leave them out")
    names = ("static_argnums", "static_argnames", "donate_argnums", "donate_argnames", "keep_unused")
    options = {name: getattr(info, name) for name in names}
    return jitted._fun, options | {"compiler_options": dict(info.compiler_options_kvs) or None}
