"""Causal attention: out = softmax(causal(q k^T / sqrt(head_dim))) v (Vaswani et al., arXiv:1706.03762)."""

import math

import jax
import jax.numpy as jnp

from xlafuse.blocks import softmax


def apply(inputs: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """`q`, `k`, `v` [batch, heads, sequence, head_dim] -> `out`, same shape; written plainly, scores and all.

    Both products are stored in the inputs' dtype; scaling, mask and softmax are float32.
    """
    q, k, v = inputs["q"], inputs["k"], inputs["v"]
    sequence, head_dim = q.shape[-2:]
    with jax.named_scope("scores"):
        scores = jnp.einsum("bhqd,bhkd->bhqk", q, k).astype(jnp.float32) / math.sqrt(head_dim)
    with jax.named_scope("mask"):
        query = jax.lax.broadcasted_iota(jnp.int32, (sequence, sequence), 0)
        key = jax.lax.broadcasted_iota(jnp.int32, (sequence, sequence), 1)
        scores = jnp.where(key <= query, scores, -jnp.inf)
    with jax.named_scope("softmax"):
        weights = softmax.stages(scores).astype(q.dtype)
    with jax.named_scope("values"):
        return {"out": jnp.einsum("bhqk,bhkd->bhqd", weights, v)}


def apply_cudnn(inputs: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """The same block through cuDNN's fused attention; needs a GPU (or a target) with cuDNN, and bfloat16 or
    float16.

    `jax.nn.dot_product_attention` wants [batch, sequence, heads, head_dim], so the transposes that a model
    with our layout pays are part of what is compiled.
    """
    q, k, v = (inputs[name].swapaxes(1, 2) for name in ("q", "k", "v"))
    with jax.named_scope("attention"):
        out = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")
    return {"out": out.swapaxes(1, 2)}
