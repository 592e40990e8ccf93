"""Attention of one new token per sequence to its cache: out = softmax(q k^T / sqrt(head_dim)) v over `lengths` keys."""

from collections.abc import Mapping

import torch
from torch import Tensor

from xlafuse.triton_side.blocks.attention import scores_of, weighted
from xlafuse.triton_side.calls.stages import stage


def stages(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    """q [batch, heads, head_dim], k and v [batch, kv_heads, capacity, head_dim], lengths [batch] -> out as q.

    Both products are in q's dtype; scaling, mask and softmax are in float32. The output is zero where a length is 0.
    """
    batch, heads, head_dim = q.shape
    kv_heads, capacity = k.shape[1:3]
    with stage("scores"):
        grouped = q.reshape(batch, kv_heads, heads // kv_heads, head_dim)
    scores = scores_of(grouped, k)
    with stage("mask"):
        beyond = torch.arange(capacity, device=q.device) >= lengths[:, None]
        scores = scores.masked_fill(beyond[:, None, None], float("-inf"))
    out = weighted(scores, v)
    with stage("values"):
        out = out.reshape(q.shape)
        return out.masked_fill(lengths[:, None, None] == 0, 0.0)


def apply(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """q [batch, heads, head_dim], k_cache, v_cache [batch, kv_heads, capacity, head_dim], lengths [batch] -> out as q;
    the caches' elements past a length must be finite."""
    return {"out": stages(*(inputs[name] for name in ("q", "k_cache", "v_cache", "lengths")))}
