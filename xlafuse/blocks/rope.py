"""Rotary position embedding of queries and keys (Su et al., arXiv:2104.09864).

As in Llama, an element of a head's first half and its counterpart in the second half are a pair.
"""

import jax
import jax.numpy as jnp


def apply(inputs: dict[str, jax.Array], *, theta: float) -> dict[str, jax.Array]:
    """Rotate pair i by position * theta^(-2i/head_dim).

    `q` [batch, heads, sequence, head_dim], `k` [batch, kv_heads, sequence, head_dim], `positions` [batch, sequence] ->
    `q_out`, `k_out`, of the shapes of q and k. Angles, cosines, sines and the rotation are float32; the result is cast
    back to the input's dtype.
    """
    q, k, positions = inputs["q"], inputs["k"], inputs["positions"]
    half = q.shape[-1] // 2
    with jax.named_scope("angles"):
        frequencies = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
        angles = positions[:, None, :, None].astype(jnp.float32) * frequencies
        cos, sin = jnp.cos(angles), jnp.sin(angles)
    with jax.named_scope("rotate_q"):
        q_out = _rotated(q, cos, sin)
    with jax.named_scope("rotate_k"):
        k_out = _rotated(k, cos, sin)
    return {"q_out": q_out, "k_out": k_out}


def _rotated(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    x1, x2 = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1).astype(x.dtype)
