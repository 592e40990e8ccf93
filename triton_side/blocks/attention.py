"""Attention with the scores in memory: out = softmax(masked(q k^T / sqrt(head_dim))) v.

Source: Vaswani et al., "Attention Is All You Need", https://arxiv.org/abs/1706.03762.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from xlafuse.triton_side.calls.stages import stage


def apply(inputs: Mapping[str, Tensor], causal: int = 1, window: int = 0) -> dict[str, Tensor]:
    """q [batch, heads, sequence, head_dim], k, v [batch, kv_heads, sequence, head_dim] -> out of q's shape.

    Shared heads of k and v are repeated. Both products are in q's dtype; scaling, mask and softmax are in float32.
    Memory grows with sequence^2: each float32 copy of the scores takes 4 * batch * heads * sequence^2 bytes, and eager
    mode holds several.
    """
    q, k, v = inputs["q"], inputs["k"], inputs["v"]
    scores = scores_of(q, k)
    if causal:
        with stage("mask"):
            position = torch.arange(q.shape[-2], device=q.device)
            hidden = position[None, :] > position[:, None]
            if window:
                hidden = hidden | (position[:, None] - position[None, :] >= window)
            scores = scores.masked_fill(hidden, float("-inf"))
    return {"out": weighted(scores, v)}


def scores_of(q: Tensor, k: Tensor) -> Tensor:
    """Return q k^T / sqrt(head_dim) of [..., heads, sequence, head_dim], in float32. Shared heads of k are repeated."""
    with stage("scores"):
        return (q @ _repeated(k, q.shape[-3]).transpose(-2, -1)).float() / math.sqrt(q.shape[-1])


def weighted(scores: Tensor, v: Tensor, empty_rows: bool = False) -> Tensor:
    """Return the softmax of the scores, in v's dtype, times v. Shared heads of v are repeated.

    empty_rows: rows of only -inf give zeros instead of NaN.
    """
    with stage("softmax"):
        # Softmax does not depend on the subtracted value, so the gradient through the maximum is zero.
        maximum = scores.amax(dim=-1, keepdim=True).detach()
        if empty_rows:
            maximum = torch.where(maximum == -math.inf, 0.0, maximum)
        exponentials = torch.exp(scores - maximum)
        total = exponentials.sum(dim=-1, keepdim=True)
        if empty_rows:
            total = torch.where(total == 0, 1.0, total)
        probabilities = (exponentials / total).to(v.dtype)
    with stage("values"):
        return probabilities @ _repeated(v, scores.shape[-3])


def _repeated(x: Tensor, heads: int) -> Tensor:
    group = heads // x.shape[-3]
    return x.repeat_interleave(group, dim=-3) if group > 1 else x
