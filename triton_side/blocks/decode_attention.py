"""Attention of the newest tokens of each sequence to its cache: out = softmax(q k^T / sqrt(head_dim)) v.

One token a sequence sees `lengths` keys; of several, query i sees the first length - queries + 1 + i.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from xlafuse.triton_side.blocks.attention import scores_of, weighted
from xlafuse.triton_side.calls.stages import stage


def stages(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    """q [batch, heads, queries, head_dim], k and v [batch, kv_heads, capacity, head_dim], lengths [batch] -> out as q.

    q lacks the axis of queries where each sequence has one. Both products are in q's dtype; scaling, mask and softmax
    are in float32. The output is zero for a query that sees no key.
    """
    batch, heads, *_, head_dim = q.shape
    kv_heads, capacity = k.shape[1:3]
    with stage("scores"):
        grouped = q.reshape(batch, kv_heads, q.shape[1:-1].numel() // kv_heads, head_dim)
    scores = scores_of(grouped, k)
    with stage("mask"):
        if q.ndim == 3:
            beyond = torch.arange(capacity, device=q.device) >= lengths[:, None]
            beyond = beyond[:, None, None]
        else:
            beyond = ~visible_keys(q.shape[2], lengths, capacity).repeat(1, heads // kv_heads, 1)[:, None]
        scores = scores.masked_fill(beyond, float("-inf"))
    out = weighted(scores, v)
    with stage("values"):
        return zero_where_unseeing(out.reshape(q.shape), lengths)


def visible_keys(queries: int, lengths: Tensor, capacity: int) -> Tensor:
    """Return whether each query sees each key: [batch, queries, capacity]."""
    return torch.arange(capacity, device=lengths.device) < keys_seen(queries, lengths)[..., None]


def keys_seen(queries: int, lengths: Tensor) -> Tensor:
    """Return the number of keys that each query sees, below 1 for none: [batch, queries]."""
    return lengths[:, None] + torch.arange(1 - queries, 1, device=lengths.device)


def zero_where_unseeing(out: Tensor, lengths: Tensor) -> Tensor:
    """Return out, of q's shape, with zeros for each query that sees no key."""
    if out.ndim == 3:
        return out.masked_fill(lengths[:, None, None] == 0, 0.0)
    return out.masked_fill(keys_seen(out.shape[2], lengths)[:, None, :, None] <= 0, 0.0)


def apply(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """q [batch, heads, queries, head_dim], or without queries, k_cache, v_cache [batch, kv_heads, capacity, head_dim],
    lengths [batch] -> out as q; the caches' elements past a length must be finite."""
    return {"out": stages(*(inputs[name] for name in ("q", "k_cache", "v_cache", "lengths")))}
