"""Attention with the scores in memory: out = softmax(masked(q k^T / sqrt(head_dim))) v.

Source: Vaswani et al., "Attention Is All You Need", https://arxiv.org/abs/1706.03762.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from triton_side.stages import stage


def apply(inputs: Mapping[str, Tensor], causal: int = 1, window: int = 0) -> dict[str, Tensor]:
    """q [batch, heads, sequence, head_dim], k, v [batch, kv_heads, sequence, head_dim] -> out of q's shape.

    Heads of k and v that are shared are repeated. Both products are in q's dtype; scaling, mask and softmax are in
    float32. Memory grows with sequence^2: each float32 copy of the scores takes 4 * batch * heads * sequence^2 bytes,
    and eager mode holds several.
    """
    q, k, v = inputs["q"], inputs["k"], inputs["v"]
    sequence, head_dim = q.shape[-2:]
    group = q.shape[1] // k.shape[1]
    with stage("scores"):
        k = k.repeat_interleave(group, dim=1) if group > 1 else k
        scores = (q @ k.transpose(-2, -1)).float() / math.sqrt(head_dim)
    if causal:
        with stage("mask"):
            position = torch.arange(sequence, device=q.device)
            hidden = position[None, :] > position[:, None]
            if window:
                hidden = hidden | (position[:, None] - position[None, :] >= window)
            scores = scores.masked_fill(hidden, float("-inf"))
    with stage("softmax"):
        # Softmax does not depend on the value subtracted, so the gradient through the maximum is zero.
        maximum = scores.amax(dim=-1, keepdim=True).detach()
        exponentials = torch.exp(scores - maximum)
        probabilities = (exponentials / exponentials.sum(dim=-1, keepdim=True)).to(q.dtype)
    with stage("values"):
        v = v.repeat_interleave(group, dim=1) if group > 1 else v
        out = probabilities @ v
    return {"out": out}
