"""Blocks by tokamax, Google's library of kernels for JAX (https://github.com/openxla/tokamax, tested: 0.0.17).

tokamax chooses an implementation by the device, and takes the next where one refuses the arguments. The kernels of the
compile show its choice: those of Pallas on Mosaic GPU end in `mosaic_gpu_kernel`, others are XLA's own. It looks a
configuration up in its own tables, and takes a heuristic one where they have none. Autotuning is a separate call, which
is not made.

Products of 16-bit types have the default precision, as in a user's call, also where the ambient one is "highest". The
tables have the precision in their key. Version 0.0.17 has tables for the H100 and none for the H200.

The arguments are those of each block's `apply` in `xlafuse/blocks/`.
"""

import functools

import jax
import tokamax

from xlafuse.blocks import moe as plain_moe
from xlafuse.blocks.rmsnorm import rmsnorm


def _precision(like: jax.Array) -> jax.lax.Precision | None:
    """Return the default for 16-bit types; None leaves float32 to the ambient precision."""
    return jax.lax.Precision.DEFAULT if like.dtype.itemsize == 2 else None


def attention(inputs: dict[str, jax.Array], causal: int = 1, window: int = 0) -> dict[str, jax.Array]:
    """Return tokamax.dot_product_attention. It takes [batch, sequence, heads, head_dim], so XLA transposes."""
    q, k, v = (inputs[name].swapaxes(1, 2) for name in ("q", "k", "v"))
    with jax.named_scope("attention"):
        out = tokamax.dot_product_attention(
            q, k, v, precision=_precision(q), is_causal=bool(causal),
            local_window_size=(window - 1, 0) if window else None,
        )
    return {"out": out.swapaxes(1, 2)}


def swiglu_mlp(inputs: dict[str, jax.Array], *, eps: float) -> dict[str, jax.Array]:
    """Return the MLP with gate, up and activation by tokamax.gated_linear_unit."""
    x = inputs["x"]
    with jax.named_scope("norm"):
        h = rmsnorm(x, inputs["norm_weight"], eps)
    with jax.named_scope("act"):
        weights = inputs["gate_weight"], inputs["up_weight"]
        activated = tokamax.gated_linear_unit(
            h, weights, activation=jax.nn.swish, precision=_precision(h)
        )
    with jax.named_scope("down"):
        down = activated @ inputs["down_weight"]
    with jax.named_scope("residual"):
        return {"y": x + down}


def moe(inputs: dict[str, jax.Array], *, top_k: int) -> dict[str, jax.Array]:
    """Return the mixture with its grouped products by tokamax.ragged_dot."""
    ragged_dot = functools.partial(tokamax.ragged_dot, precision=_precision(inputs["x"]))
    return plain_moe.apply(inputs, top_k=top_k, ragged_dot=ragged_dot)
