"""The one file that touches jax API without a stability promise (versions.py: the tested series)."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import compiler
from jax._src.cudnn import fused_attention_stablehlo as cudnn
from jax._src.interpreters import mlir
from jax._src.lib import _jax
from jax._src.lib.mlir import ir
from jax.experimental import topologies

from xlafuse import versions


def check_version() -> None:
    """Raise RuntimeError unless this jax is of a series that the calls below were tested on."""
    if ".".join(jax.__version__.split(".")[:2]) not in versions.JAX:
        raise RuntimeError(
            f"xlafuse reads XLA's output through jax {', '.join(versions.JAX)}; this is jax {jax.__version__}. "
            "Install one of those"
        )


@functools.cache
def target_device(config_text: str) -> Any:
    """A device that exists only as a GpuTargetConfigProto: code can be compiled for it, not run on it."""
    check_version()
    topology = topologies.get_topology_desc(platform="cuda", topology="1x1x1", target_config=config_text)
    return topology.devices[0]


def optimized_module_proto(compiled: jax.stages.Compiled) -> bytes:
    """The optimized module as a serialized HloModuleProto."""
    check_version()
    executable: Any = compiled.runtime_executable()
    (module,) = executable.hlo_modules()
    return module.as_serialized_hlo_module_proto()


def compile_stablehlo(text: str, options: dict[str, Any], config_text: str | None) -> str:
    """The optimized HLO of a StableHLO module in text form, for a target's config or the default device.

    jax has no public way from StableHLO to an executable; `Lowered.compile` needs the trace that made it.
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
    """cuDNN's softmax(q k^T / sqrt(head_dim)) v over the first `lengths` keys: q [batch, heads, queries, head_dim], k
    and v [batch, kv_heads, keys, head_dim]. jax.nn.dot_product_attention, else the same, takes heads behind keys alone.
    """
    check_version()
    queries = jnp.full(len(q), q.shape[2], jnp.int32)
    return cudnn.dot_product_attention(
        q, k, v, q_seqlen=queries, kv_seqlen=lengths, scale=q.shape[-1] ** -0.5, mask_type=cudnn.MaskType.PADDING,
        qkv_layout="BNTH",
    )


def jit_options(jitted: Any) -> tuple[Any, dict[str, Any]]:
    """(function, options): `jax.jit(function, **options)` is `jitted` again. A pickled one has lost its options.

    Raises ValueError where it was jitted with shardings: they name devices of this process.
    """
    check_version()
    info = jitted._jit_info
    if info.user_specified_in_shardings:
        raise ValueError("it is jitted with in_shardings, which name this process's devices; leave them out")
    names = ("static_argnums", "static_argnames", "donate_argnums", "donate_argnames", "keep_unused")
    options = {name: getattr(info, name) for name in names}
    return jitted._fun, options | {"compiler_options": dict(info.compiler_options_kvs) or None}
