"""Causal attention of packed sequences, with the scores of all pairs of tokens in memory."""

from collections.abc import Mapping

import torch
from torch import Tensor

from xlafuse.triton_side.blocks.attention import scores_of, weighted
from xlafuse.triton_side.calls.stages import stage


def apply(inputs: Mapping[str, Tensor], longest: int) -> dict[str, Tensor]:
    """q [tokens, heads, head_dim], k, v [tokens, kv_heads, head_dim], cu_seqlens [sequences + 1] int32 -> out as q.

    Shared heads of k and v are repeated. Both products are in q's dtype; scaling, mask and softmax are in float32.
    `longest`, the length of the longest sequence, is not used here.
    """
    q, k, v = (inputs[name].transpose(0, 1) for name in "qkv")
    scores = scores_of(q, k)
    with stage("mask"):
        position = torch.arange(q.shape[1], device=q.device)
        sequence = (inputs["cu_seqlens"][1:] <= position[:, None]).sum(dim=1)
        hidden = (sequence[:, None] != sequence) | (position[:, None] < position)
        scores = scores.masked_fill(hidden, float("-inf"))
    return {"out": weighted(scores, v).transpose(0, 1)}
