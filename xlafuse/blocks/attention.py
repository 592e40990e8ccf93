"""Attention: out = softmax(masked(q k^T / sqrt(head_dim))) v (Vaswani et al., arXiv:1706.03762)."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from xlafuse.blocks import softmax


def apply(inputs: dict[str, jax.Array], causal: int = 1, window: int = 0) -> dict[str, jax.Array]:
    """Return attention, with the scores written out.

    `q` [batch, heads, sequence, head_dim], `k`, `v` [batch, kv_heads, sequence, head_dim] -> `out`, of q's shape.
    Shared heads of k and v are repeated. Both products are stored in the inputs' dtype; scaling, mask and softmax are
    float32.
    """
    q, k, v = inputs["q"], inputs["k"], inputs["v"]
    sequence, head_dim = q.shape[-2:]
    group = q.shape[1] // k.shape[1]
    with jax.named_scope("scores"):
        k = jnp.repeat(k, group, axis=1) if group > 1 else k
        scores = jnp.einsum("bhqd,bhkd->bhqk", q, k).astype(jnp.float32) / math.sqrt(head_dim)
    if causal:
        with jax.named_scope("mask"):
            query = jax.lax.broadcasted_iota(jnp.int32, (sequence, sequence), 0)
            key = jax.lax.broadcasted_iota(jnp.int32, (sequence, sequence), 1)
            visible = (key <= query) & (query - key < window) if window else key <= query
            scores = jnp.where(visible, scores, -jnp.inf)
    with jax.named_scope("softmax"):
        weights = softmax.softmax(scores).astype(q.dtype)
    with jax.named_scope("values"):
        v = jnp.repeat(v, group, axis=1) if group > 1 else v
        return {"out": jnp.einsum("bhqk,bhkd->bhqd", weights, v)}


def apply_cudnn(inputs: dict[str, jax.Array], causal: int = 1, window: int = 0) -> dict[str, jax.Array]:
    """Return the same through cuDNN's fused attention. It needs a GPU (or target) with cuDNN, and bfloat16 or float16.

    jax gives a window as (keys before, keys after).
    """
    return cudnn(inputs, is_causal=bool(causal), local_window_size=(window - 1, 0) if window else None)


def cudnn(inputs: dict[str, jax.Array], **options: Any) -> dict[str, jax.Array]:
    """Return jax.nn.dot_product_attention with `options`.

    It takes [batch, sequence, heads, head_dim], so the compiled code contains the transposes that a model with our
    layout needs.
    """
    q, k, v = (inputs[name].swapaxes(1, 2) for name in ("q", "k", "v"))
    with jax.named_scope("attention"):
        out = jax.nn.dot_product_attention(q, k, v, implementation="cudnn", **options)
    return {"out": out.swapaxes(1, 2)}
