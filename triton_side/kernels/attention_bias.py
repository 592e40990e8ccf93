"""Attention with an additive bias on the scores (T5, arXiv 1910.10683).

    out = softmax(q k^T / sqrt(head_dim) + bias) v

The kernels are in `attention.py`. Shapes: q, k, v, out [batch, heads, sequence, head_dim]; bias [heads, sequence,
sequence], shared by the whole batch.
"""

import torch

from xlafuse.triton_side.kernels.attention import check_shapes, run
from xlafuse.triton_side.kernels.shared.launch import check_tensors


def attention_bias(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Return softmax(q k^T / sqrt(head_dim) + bias) v, differentiable once in q, k, v and bias.

    Tensors of any strides are read without a copy. A bias of -inf hides a key from a query. A query without a visible
    key has an output of zeros and gradients of zeros. If float32 cannot hold a float32 or bfloat16 bias times
    sqrt(head_dim), that bias counts as infinite.

    Args:
        q, k, v: [batch, heads, sequence, head_dim], in bfloat16, float16 or float32.
        bias: [heads, sequence, sequence], of queries by keys, in q's dtype.

    Returns:
        out [batch, heads, sequence, head_dim], contiguous, in the inputs' dtype.

    Raises:
        ValueError: the shapes do not fit, or `attention` would raise it.
        TypeError: a dtype is not supported, or they differ.
    """
    check_tensors(q=q, k=k, v=v, bias=bias)
    check_shapes(q, k, v)
    if q.shape != k.shape or bias.shape != (q.shape[1], q.shape[2], q.shape[2]):
        raise ValueError(
            "q, k and v must be [batch, heads, sequence, head_dim] and bias [heads, sequence, sequence], got "
            f"{tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)} and {tuple(bias.shape)}"
        )
    return run(q, k, v, False, 0, bias=bias)


def apply(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Run the block `attention_bias`: q, k, v, bias -> out."""
    return {"out": attention_bias(inputs["q"], inputs["k"], inputs["v"], inputs["bias"])}
