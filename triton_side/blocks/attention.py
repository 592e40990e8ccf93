"""Causal attention with the scores in memory: out = softmax(causal(q k^T / sqrt(head_dim))) v.

Source: Vaswani et al., "Attention Is All You Need", https://arxiv.org/abs/1706.03762.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from triton_side.stages import stage


def apply(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """q, k, v [batch, heads, sequence, head_dim] -> out of the same shape.

    Both products are in q's dtype; scaling, mask and softmax are in float32. Memory grows with sequence^2:
    each float32 copy of the scores takes 4 * batch * heads * sequence^2 bytes, and eager mode holds
    several.
    """
    q, k, v = inputs["q"], inputs["k"], inputs["v"]
    sequence, head_dim = q.shape[-2:]
    with stage("scores"):
        scores = (q @ k.transpose(-2, -1)).float() / math.sqrt(head_dim)
    with stage("mask"):
        position = torch.arange(sequence, device=q.device)
        future = position[None, :] > position[:, None]
        scores = scores.masked_fill(future, float("-inf"))
    with stage("softmax"):
        # Softmax does not depend on the value subtracted, so the gradient through the maximum is zero.
        maximum = scores.amax(dim=-1, keepdim=True).detach()
        exponentials = torch.exp(scores - maximum)
        probabilities = (exponentials / exponentials.sum(dim=-1, keepdim=True)).to(q.dtype)
    with stage("values"):
        out = probabilities @ v
    return {"out": out}
