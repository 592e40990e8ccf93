"""Attention with an additive bias: out = softmax(q k^T / sqrt(head_dim) + bias) v (T5, arXiv 1910.10683)."""

import math

import jax
import jax.numpy as jnp

from xlafuse.blocks import attention, softmax


def apply(inputs: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Return attention with a bias, with the scores written out.

    `q`, `k`, `v` [batch, heads, sequence, head_dim], `bias` [heads, sequence, sequence] -> `out`, of q's shape. Both
    products are stored in the inputs' dtype; scaling, bias and softmax are float32. The result of a query whose biases
    are all -inf is zeros.
    """
    q, k, v = inputs["q"], inputs["k"], inputs["v"]
    with jax.named_scope("scores"):
        scores = jnp.einsum("bhqd,bhkd->bhqk", q, k).astype(jnp.float32) / math.sqrt(q.shape[-1])
    with jax.named_scope("bias"):
        scores = scores + inputs["bias"].astype(jnp.float32)
    with jax.named_scope("softmax"):
        weights = softmax.softmax(scores, empty_rows=True).astype(q.dtype)
    with jax.named_scope("values"):
        return {"out": jnp.einsum("bhqk,bhkd->bhqd", weights, v)}


def apply_cudnn(inputs: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Return the same through cuDNN's fused attention. It needs a GPU (or target) with cuDNN, and bfloat16 or float16.

    The result of a query whose biases are all -inf is undefined.
    """
    return attention.cudnn(inputs, bias=inputs["bias"][None])
