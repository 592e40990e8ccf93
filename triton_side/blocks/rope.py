"""Rotary position embedding of queries and keys: pair i of a head is rotated by position * theta^(-2i/head_dim).

Source: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", https://arxiv.org/abs/2104.09864. As
in Llama, pair i is element i of a head's first half and element i of its second half.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from xlafuse.triton_side.calls.stages import stage


def apply(inputs: Mapping[str, Tensor], *, theta: float) -> dict[str, Tensor]:
    """q [batch, heads, sequence, head_dim], k [batch, kv_heads, sequence, head_dim], positions [batch, sequence]
    -> q_out, k_out, with the shapes of q and k.

    Angles, cosines, sines and rotations are computed in float32. q_out and k_out have the dtypes of q and k.
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
