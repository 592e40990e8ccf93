"""Causal attention of packed sequences: out = softmax(masked(q k^T / sqrt(head_dim))) v over all tokens."""

import math

import jax
import jax.numpy as jnp

from xlafuse.blocks import softmax


def apply(inputs: dict[str, jax.Array], longest: int) -> dict[str, jax.Array]:
    """`q` [tokens, heads, head_dim], `k`, `v` [tokens, kv_heads, head_dim], `cu_seqlens` [sequences + 1], int32 ->
    `out`, of q's shape; written plainly: scores of all tokens with all, those of other sequences masked.

    Both products are stored in the inputs' dtype; scaling, mask and softmax are float32. `longest`, the length of the
    longest sequence, is of no use here.
    """
    q, k, v, cu_seqlens = (inputs[name] for name in ("q", "k", "v", "cu_seqlens"))
    tokens, heads, head_dim = q.shape
    group = heads // k.shape[1]
    with jax.named_scope("scores"):
        k = jnp.repeat(k, group, axis=1) if group > 1 else k
        scores = jnp.einsum("qhd,khd->hqk", q, k).astype(jnp.float32) / math.sqrt(head_dim)
    with jax.named_scope("mask"):
        position = jnp.arange(tokens)
        sequence = jnp.sum(cu_seqlens[1:] <= position[:, None], axis=1)
        seen = (sequence[:, None] == sequence) & (position[:, None] >= position)
        scores = jnp.where(seen, scores, -jnp.inf)
    with jax.named_scope("softmax"):
        weights = softmax.stages(scores).astype(q.dtype)
    with jax.named_scope("values"):
        v = jnp.repeat(v, group, axis=1) if group > 1 else v
        return {"out": jnp.einsum("hqk,khd->qhd", weights, v)}
