"""Causal attention of packed sequences, with the scores of all tokens with all in memory."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from triton_side.stages import stage


def apply(inputs: Mapping[str, Tensor], longest: int) -> dict[str, Tensor]:
    """q [tokens, heads, head_dim], k, v [tokens, kv_heads, head_dim], cu_seqlens [sequences + 1], int32 -> out of q's
    shape.

    Heads of k and v that are shared are repeated. Both products are in q's dtype; scaling, mask and softmax are in
    float32. `longest`, the length of the longest sequence, is of no use here.
    """
    q, k, v = (inputs[name].transpose(0, 1) for name in "qkv")
    group = q.shape[0] // k.shape[0]
    with stage("scores"):
        k = k.repeat_interleave(group, dim=0) if group > 1 else k
        scores = (q @ k.transpose(-2, -1)).float() / math.sqrt(q.shape[-1])
    with stage("mask"):
        position = torch.arange(q.shape[1], device=q.device)
        sequence = (inputs["cu_seqlens"][1:] <= position[:, None]).sum(dim=1)
        hidden = (sequence[:, None] != sequence) | (position[:, None] < position)
        scores = scores.masked_fill(hidden, float("-inf"))
    with stage("softmax"):
        # Softmax does not depend on the value subtracted, so the gradient through the maximum is zero.
        maximum = scores.amax(dim=-1, keepdim=True).detach()
        exponentials = torch.exp(scores - maximum)
        probabilities = (exponentials / exponentials.sum(dim=-1, keepdim=True)).to(q.dtype)
    with stage("values"):
        v = v.repeat_interleave(group, dim=0) if group > 1 else v
        out = probabilities @ v
    return {"out": out.transpose(0, 1)}
