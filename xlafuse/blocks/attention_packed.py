"""Causal attention of packed sequences: out = softmax(masked(q k^T / sqrt(head_dim))) v over all tokens."""

import math
from typing import Literal

import jax
import jax.numpy as jnp

from xlafuse.blocks import softmax


def same_sequence(cu_seqlens: jax.Array, tokens: int) -> jax.Array:
    """Return [tokens, tokens]: true for two tokens of the same sequence."""
    sequence = jnp.sum(cu_seqlens[1:] <= jnp.arange(tokens)[:, None], axis=1)
    return sequence[:, None] == sequence


def apply(inputs: dict[str, jax.Array], longest: int) -> dict[str, jax.Array]:
    """Return attention with the scores of all pairs of tokens; pairs from two sequences are masked.

    `q` [tokens, heads, head_dim], `k`, `v` [tokens, kv_heads, head_dim], `cu_seqlens` [sequences + 1], int32 -> `out`,
    of q's shape. Both products are stored in the inputs' dtype; scaling, mask and softmax are float32. `longest`, the
    length of the longest sequence, is unused.
    """
    q, k, v, cu_seqlens = (inputs[name] for name in ("q", "k", "v", "cu_seqlens"))
    tokens, heads, head_dim = q.shape
    group = heads // k.shape[1]
    with jax.named_scope("scores"):
        k = jnp.repeat(k, group, axis=1) if group > 1 else k
        scores = jnp.einsum("qhd,khd->hqk", q, k).astype(jnp.float32) / math.sqrt(head_dim)
    with jax.named_scope("mask"):
        position = jnp.arange(tokens)
        visible = same_sequence(cu_seqlens, tokens) & (position[:, None] >= position)
        scores = jnp.where(visible, scores, -jnp.inf)
    with jax.named_scope("softmax"):
        weights = softmax.softmax(scores).astype(q.dtype)
    with jax.named_scope("values"):
        v = jnp.repeat(v, group, axis=1) if group > 1 else v
        return {"out": jnp.einsum("hqk,khd->qhd", weights, v)}


def apply_cudnn(
    inputs: dict[str, jax.Array], longest: int, implementation: Literal["cudnn", "xla"] = "cudnn"
) -> dict[str, jax.Array]:
    """Return the same through cuDNN's fused attention, with all tokens as one sequence.

    It needs a GPU (or a target) with cuDNN, and bfloat16 or float16. `jax.nn.dot_product_attention` takes no cu_seqlens
    (jax 0.11.2). It takes a mask, which becomes a bias in memory: 0, or -2^41 (float16: -2^15), which makes a weight
    exactly zero. Every token has a key, itself. cuDNN computes the whole causal half, including other sequences' keys.
    `implementation` is passed to that function.
    """
    q, k, v = (inputs[name][None] for name in "qkv")
    with jax.named_scope("mask"):
        mask = same_sequence(inputs["cu_seqlens"], q.shape[1])[None, None]
    with jax.named_scope("attention"):
        out = jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=True, implementation=implementation)
    return {"out": out[0]}
