"""Attention with a bias on the scores, these in memory: out = softmax(q k^T / sqrt(head_dim) + bias) v.

Source: Raffel et al., "Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer" (T5),
https://arxiv.org/abs/1910.10683.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from triton_side.stages import stage


def apply(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """q, k, v [batch, heads, sequence, head_dim], bias [heads, sequence, sequence] -> out of q's shape.

    Both products are in q's dtype; scaling, bias and softmax are in float32. A query whose biases are all -inf gives
    zeros. Memory grows with sequence^2, as in `attention`.
    """
    q, k, v = inputs["q"], inputs["k"], inputs["v"]
    with stage("scores"):
        scores = (q @ k.transpose(-2, -1)).float() / math.sqrt(q.shape[-1])
    with stage("bias"):
        scores = scores + inputs["bias"].float()
    with stage("softmax"):
        # Softmax does not depend on the value subtracted, so the gradient through the maximum is zero.
        maximum = scores.amax(dim=-1, keepdim=True).detach()
        exponentials = torch.exp(scores - torch.where(maximum > -math.inf, maximum, 0.0))
        total = exponentials.sum(dim=-1, keepdim=True)
        probabilities = (exponentials / torch.where(total > 0, total, 1.0)).to(q.dtype)
    with stage("values"):
        return {"out": probabilities @ v}
