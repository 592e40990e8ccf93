"""Rotary position embedding of queries and keys: pair i of a head is rotated by position * theta^(-2i/head_dim).

Source: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", https://arxiv.org/abs/2104.09864. As
in Llama, a pair is one element of a head's first half and one of the second.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from triton_side.calls.stages import stage


def apply(inputs: Mapping[str, Tensor], *, theta: float) -> dict[str, Tensor]:
    """q [batch, heads, sequence, head_dim], k [batch, kv_heads, sequence, head_dim], positions [batch, sequence]
    -> q_out, k_out, of the shapes of q and k.

    Angles, cosines, sines and the rotation are in float32. The results are cast to the inputs' dtypes.
    """
    q, k, positions = inputs["q"], inputs["k"], inputs["positions"]
    half = q.shape[-1] // 2
    with stage("angles"):
        pair = torch.arange(half, dtype=torch.float32, device=q.device)
        angles = positions[:, None, :, None] * theta ** (-pair / half)
        cos, sin = torch.cos(angles), torch.sin(angles)
    with stage("rotate_q"):
        q_out = _rotated(q, cos, sin)
    with stage("rotate_k"):
        k_out = _rotated(k, cos, sin)
    return {"q_out": q_out, "k_out": k_out}


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    x1, x2 = x.float().chunk(2, dim=-1)
    return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], dim=-1).to(x.dtype)
