"""Causal attention of sequences packed one after the other, by the kernels of `attention.py`.

Shapes: q, out [tokens, heads, head_dim]; k, v [tokens, kv_heads, head_dim]. Sequence i has the tokens cu_seqlens[i] ..
cu_seqlens[i + 1]. Only tokens of its own sequence, at its own position and before, are visible to a token. Programs
find their sequence in cu_seqlens, which the host does not read. No tile holds tokens of two sequences.
"""

import torch

from xlafuse.triton_side.kernels.attention import check_shapes, run
from xlafuse.triton_side.kernels.shared.launch import check_tensors


def attention_packed(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor, *, kernels: str = "auto"
) -> torch.Tensor:
    """Return softmax(masked(q k^T / sqrt(head_dim))) v of each sequence, differentiable once in q, k and v.

    Tensors of any strides are read without a copy. Heads are shared as in `attention`.

    Args:
        q: [tokens, heads, head_dim], in bfloat16, float16 or float32.
        k, v: [tokens, kv_heads, head_dim], kv_heads a divisor of heads, in q's dtype.
        cu_seqlens: int32 [sequences + 1], contiguous, rising from 0 to tokens; sequences may be empty. Its numbers are
            not checked: wrong ones read and write outside the tensors.
        kernels: as in `attention`.

    Returns:
        out [tokens, heads, head_dim], contiguous, in the inputs' dtype.

    Raises:
        ValueError: the shapes do not fit, or `attention` would raise it.
        TypeError: a dtype is not supported, or they differ.
    """
    check_tensors(q=q, k=k, v=v)
    if any(x.ndim != 3 for x in (q, k, v)):
        raise ValueError(
            f"q, k and v must be [tokens, heads, head_dim], got {tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}"
        )
    if cu_seqlens.dtype != torch.int32:
        raise TypeError(f"cu_seqlens must be int32, got {cu_seqlens.dtype}; cast it with .to(torch.int32)")
    if cu_seqlens.ndim != 1 or len(cu_seqlens) < 2 or not cu_seqlens.is_contiguous() or cu_seqlens.device != q.device:
        raise ValueError(
            f"cu_seqlens must be contiguous [sequences + 1] on {q.device}, got shape {tuple(cu_seqlens.shape)}, "
            f"strides {cu_seqlens.stride()} on {cu_seqlens.device}"
        )
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    check_shapes(q, k, v)
    return run(q, k, v, True, 0, offsets=cu_seqlens, kernels=kernels).squeeze(0).transpose(0, 1)


def apply(inputs: dict[str, torch.Tensor], longest: int) -> dict[str, torch.Tensor]:
    """Run the block `attention_packed`: q, k, v, cu_seqlens -> out. `longest`, the longest sequence, is not used."""
    return {"out": attention_packed(inputs["q"], inputs["k"], inputs["v"], inputs["cu_seqlens"])}
