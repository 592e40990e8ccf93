"""Attention of the newest tokens of each sequence to its cache: out = softmax(q k^T / sqrt(head_dim)) v.

One token a sequence sees `lengths` keys; of several, query i sees the first length - queries + 1 + i.
"""

import math

import jax
import jax.numpy as jnp

from xlafuse.blocks import softmax
from xlafuse.compile._jax_private import cudnn_attention


def keys_seen(lengths: jax.Array, queries: int) -> jax.Array:
    """Return the number of keys that each query sees, below 1 for none: [batch, queries]."""
    return lengths[:, None] + jnp.arange(1 - queries, 1, dtype=lengths.dtype)


def visible_keys(queries: int, lengths: jax.Array, capacity: int) -> jax.Array:
    """Return whether each query sees each key: [batch, queries, capacity]."""
    position = jax.lax.broadcasted_iota(jnp.int32, (len(lengths), 1, capacity), 2)
    return position < keys_seen(lengths, queries)[..., None]


def attend(q: jax.Array, k: jax.Array, v: jax.Array, lengths: jax.Array) -> jax.Array:
    """Return attention: q [batch, heads, queries, head_dim], k and v [batch, kv_heads, capacity, head_dim].

    q lacks the axis of queries where each sequence has one. lengths is [batch]. The result has q's shape, and is zero
    for a query that sees no key. Both products are stored in the inputs' dtype; scaling, mask and softmax are float32.
    """
    batch, heads, *_, head_dim = q.shape
    kv_heads, capacity = k.shape[1:3]
    with jax.named_scope("scores"):
        grouped = q.reshape(batch, kv_heads, -1, head_dim)
        scores = jnp.einsum("bngd,bnkd->bngk", grouped, k).astype(jnp.float32) / math.sqrt(head_dim)
    with jax.named_scope("mask"):
        if q.ndim == 3:
            visible = jax.lax.broadcasted_iota(jnp.int32, (batch, capacity), 1) < lengths[:, None]
            visible = visible[:, None, None]
        else:
            visible = jnp.tile(visible_keys(q.shape[2], lengths, capacity), (1, heads // kv_heads, 1))[:, None]
        scores = jnp.where(visible, scores, -jnp.inf)
    with jax.named_scope("softmax"):
        weights = softmax.softmax(scores).astype(q.dtype)
    with jax.named_scope("values"):
        out = jnp.einsum("bngk,bnkd->bngd", weights, v).reshape(q.shape)
        return zero_where_unseeing(out, lengths)


def zero_where_unseeing(out: jax.Array, lengths: jax.Array) -> jax.Array:
    """Return out, of q's shape, with zeros for each query that sees no key."""
    if out.ndim == 3:
        return jnp.where(lengths[:, None, None] > 0, out, 0)
    return jnp.where(keys_seen(lengths, out.shape[2])[:, None, :, None] > 0, out, 0)


def apply(inputs: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Return attention to a cache.

    `q` [batch, heads, queries, head_dim], or without queries, `k_cache`, `v_cache` [batch, kv_heads, capacity,
    head_dim], `lengths` [batch] -> `out`, of q's shape. The caches' elements past a length must be finite.
    """
    return {"out": attend(*(inputs[name] for name in ("q", "k_cache", "v_cache", "lengths")))}


def apply_cudnn(inputs: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Return the same through cuDNN's fused attention. It needs a GPU (or target) with cuDNN, and bfloat16 or float16.

    `jax.nn.dot_product_attention` takes only caches of [batch, capacity, kv_heads, head_dim], so it would copy these.
    The function under it takes them as they are. Its causal mask is aligned to the first key, so several queries pass a
    mask, which becomes a bias.
    """
    q, k, v, lengths = (inputs[name] for name in ("q", "k_cache", "v_cache", "lengths"))
    with jax.named_scope("attention"):
        if q.ndim == 3:
            out = cudnn_attention(q[:, :, None], k, v, lengths)[:, :, 0]
        else:
            out = cudnn_attention(q, k, v, mask=visible_keys(q.shape[2], lengths, k.shape[2])[:, None])
        return {"out": zero_where_unseeing(out, lengths)}
