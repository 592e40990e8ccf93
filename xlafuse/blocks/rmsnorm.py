"""RMSNorm: y = (x * rsqrt(mean(x^2) + eps)) * weight (Zhang and Sennrich, arXiv:1910.07467)."""

import jax
import jax.numpy as jnp


def rmsnorm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Normalise over the last axis in float32; cast to x's dtype before multiplying by the weight, as in Llama.

    MaxText and Hugging Face's Llama do the same (docs/opponents.md). The weight's gradient is a sum in x's dtype.
    """
    with jax.named_scope("mean_square"):
        wide = x.astype(jnp.float32)
        mean_square = jnp.mean(wide * wide, axis=-1, keepdims=True)
    with jax.named_scope("normalize"):
        normalized = (wide * jax.lax.rsqrt(mean_square + eps)).astype(x.dtype)
    with jax.named_scope("weight"):
        return normalized * weight


def apply(inputs: dict[str, jax.Array], *, eps: float) -> dict[str, jax.Array]:
    """Return the norm: `x` [rows, columns], `weight` [columns] -> `y` [rows, columns] in x's dtype.

    `eps` is added to the mean square.
    """
    return {"y": rmsnorm(inputs["x"], inputs["weight"], eps)}
