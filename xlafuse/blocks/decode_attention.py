"""Attention of one new token per sequence to its cache: out = softmax(q k^T / sqrt(head_dim)) v over `lengths` keys."""

import math

import jax
import jax.numpy as jnp

from xlafuse.blocks import softmax
from xlafuse.compile._jax_private import cudnn_attention


def attend(q: jax.Array, k: jax.Array, v: jax.Array, lengths: jax.Array) -> jax.Array:
    """Return attention: q [batch, heads, head_dim], k and v [batch, kv_heads, capacity, head_dim], lengths [batch].

    The result has q's shape, and is zero for a length of 0. Both products are stored in the inputs' dtype; scaling,
    mask and softmax are float32.
    """
    batch, heads, head_dim = q.shape
    kv_heads, capacity = k.shape[1:3]
    with jax.named_scope("scores"):
        grouped = q.reshape(batch, kv_heads, heads // kv_heads, head_dim)
        scores = jnp.einsum("bngd,bnkd->bngk", grouped, k).astype(jnp.float32) / math.sqrt(head_dim)
    with jax.named_scope("mask"):
        visible = jax.lax.broadcasted_iota(jnp.int32, (batch, capacity), 1) < lengths[:, None]
        scores = jnp.where(visible[:, None, None], scores, -jnp.inf)
    with jax.named_scope("softmax"):
        weights = softmax.softmax(scores).astype(q.dtype)
    with jax.named_scope("values"):
        out = jnp.einsum("bngk,bnkd->bngd", weights, v).reshape(q.shape)
        return jnp.where(lengths[:, None, None] > 0, out, 0)


def apply(inputs: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Return attention to a cache.

    `q` [batch, heads, head_dim], `k_cache`, `v_cache` [batch, kv_heads, capacity, head_dim], `lengths` [batch] ->
    `out`, of q's shape. The caches' elements past a length must be finite.
    """
    return {"out": attend(*(inputs[name] for name in ("q", "k_cache", "v_cache", "lengths")))}


def apply_cudnn(inputs: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Return the same through cuDNN's fused attention. It needs a GPU (or target) with cuDNN, and bfloat16 or float16.

    `jax.nn.dot_product_attention` takes only caches of [batch, capacity, kv_heads, head_dim], so it would copy these.
    The function under it takes them as they are.
    """
    q, lengths = inputs["q"], inputs["lengths"]
    with jax.named_scope("attention"):
        out = cudnn_attention(q[:, :, None], inputs["k_cache"], inputs["v_cache"], lengths)[:, :, 0]
        return {"out": jnp.where(lengths[:, None, None] > 0, out, 0)}
