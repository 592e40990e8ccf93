"""RMSNorm: y = (x * rsqrt(mean(x^2) + eps)) * weight (Zhang and Sennrich, arXiv:1910.07467)."""

import jax
import jax.numpy as jnp

from xlafuse.blocks.linear import broadcast_in_float32


def rmsnorm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Normalise over the last axis in float32; cast to x's dtype before multiplying by the weight, as in Llama."""
    with jax.named_scope("mean_square"):
        wide = x.astype(jnp.float32)
        mean_square = jnp.mean(wide * wide, axis=-1, keepdims=True)
    with jax.named_scope("normalize"):
        normalized = (wide * jax.lax.rsqrt(mean_square + eps)).astype(x.dtype)
    with jax.named_scope("weight"):
        return normalized * broadcast_in_float32(weight, normalized)


def apply(inputs: dict[str, jax.Array], *, eps: float) -> dict[str, jax.Array]:
    """Return the norm: `x` [rows, columns], `weight` [columns] -> `y` [rows, columns] in x's dtype.

    `eps` is added to the mean square.
    """
    return {"y": rmsnorm(inputs["x"], inputs["weight"], eps)}
