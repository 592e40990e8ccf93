"""Dropout, residual and LayerNorm between two products of a GPT-2 layer; an explicit seed gives the dropout mask.

h = residual + dropout(x + bias), y = layer_norm(h) * weight + shift (Srivastava et al., JMLR 15, 2014; Ba et al.,
arXiv:1607.06450).
"""

import math

import jax
import jax.numpy as jnp

from xlafuse.blocks.threefry import uniforms


def dropped_sum(x: jax.Array, bias: jax.Array, residual: jax.Array, seed: jax.Array, p: float) -> jax.Array:
    """Return h = residual + dropout(x + bias), in x's dtype, as flax.nnx.Linear and flax.nnx.Dropout compute it.

    The scale of the kept elements is rounded to that dtype, in bfloat16 by 0.2%.
    """
    rows, columns = x.shape
    threshold = math.ceil(p * 65536)
    with jax.named_scope("bias"):
        biased = x + bias
    with jax.named_scope("random"):
        kept = uniforms(rows, columns, seed) >= threshold
    with jax.named_scope("dropout"):
        dropped = jnp.where(kept, biased / (1 - threshold / 65536), 0.0)
    with jax.named_scope("residual"):
        return residual + dropped


def apply(inputs: dict[str, jax.Array], *, p: float, eps: float) -> dict[str, jax.Array]:
    """Return y and h.

    `x` and `residual` [rows, columns], `bias`, `weight` and `shift` [columns], `seed` [2] in int32 -> `y` and `h`
    [rows, columns] in x's dtype.

    h is computed in x's dtype. The norm is float32, including weight and shift. An element is dropped with probability
    p, rounded up to a multiple of 2^-16.
    """
    x = inputs["x"]
    h = dropped_sum(x, inputs["bias"], inputs["residual"], inputs["seed"], p)
    with jax.named_scope("mean"):
        wide = h.astype(jnp.float32)
        centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
    with jax.named_scope("variance"):
        variance = jnp.mean(centred * centred, axis=-1, keepdims=True)
    with jax.named_scope("normalize"):
        normalized = centred * jax.lax.rsqrt(variance + eps)
    with jax.named_scope("affine"):
        y = (normalized * inputs["weight"] + inputs["shift"]).astype(x.dtype)
    return {"y": y, "h": h}
