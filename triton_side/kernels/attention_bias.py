"""Attention with an additive bias on the scores (T5, arXiv 1910.10683), by the kernels of `attention.py`:
out = softmax(q k^T / sqrt(head_dim) + bias) v.

q, k, v, out [batch, heads, sequence, head_dim]; bias [heads, sequence, sequence], one for the whole batch.
"""

import torch

from triton_side.kernels._launch import check_tensors
from triton_side.kernels.attention import check_shapes, run


def attention_bias(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """softmax(q k^T / sqrt(head_dim) + bias) v, differentiable once in q, k, v and bias.

    Any strides are read in place. A bias of -inf hides a key from a query; a query that sees no key has an output of
    zeros, and gives and gets gradients of zeros. A bias of float32 or bfloat16 times sqrt(head_dim) that float32 does
    not hold counts as infinite.

    Args:
        q, k, v: [batch, heads, sequence, head_dim], in bfloat16, float16 or float32.
        bias: [heads, sequence, sequence], of queries by keys, in q's dtype.

    Returns:
        out [batch, heads, sequence, head_dim], contiguous, in the inputs' dtype.

    Raises:
        ValueError: the shapes do not fit, or what `attention` refuses.
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
    """The attention_bias block: inputs q, k, v, bias; output out."""
    return {"out": attention_bias(inputs["q"], inputs["k"], inputs["v"], inputs["bias"])}
