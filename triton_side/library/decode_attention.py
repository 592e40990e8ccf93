"""Attention of the newest tokens of each sequence to its cache by PyTorch's fused backends.

out = softmax(q k^T / sqrt(head_dim)) v, with q and out [batch, heads, queries, head_dim], or without queries, and the
caches [batch, kv_heads, capacity, head_dim]. Query i sees the first length - queries + 1 + i keys.
scaled_dot_product_attention takes that as a mask. Its FlashAttention-2 backend takes no mask but `causal_lower_right`
(torch 2.13), for full caches.
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from xlafuse.triton_side.blocks.decode_attention import visible_keys, zero_where_unseeing
from xlafuse.triton_side.calls.dispatch import unobserved

BLOCK = 128  # keys per block of FlexAttention's mask


def attend(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    """Attend with the backend that SDPA chooses. The output is zero for a query that sees no key."""
    if q.ndim == 3:
        seen = torch.arange(k.shape[2], device=q.device) < lengths[:, None]
        out = F.scaled_dot_product_attention(q[:, :, None], k, v, attn_mask=seen[:, None, None], enable_gqa=True)
        return zero_where_unseeing(out[:, :, 0], lengths)
    seen = visible_keys(q.shape[2], lengths, k.shape[2])
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen[:, None], enable_gqa=True)
    return zero_where_unseeing(out, lengths)


def attend_cudnn(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    """Attend with the cuDNN backend only, which has no CPU path. Raises RuntimeError if it cannot take the case."""
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return attend(q, k, v, lengths)


def _given(inputs: Mapping[str, Tensor]) -> list[Tensor]:
    return [inputs[name] for name in ("q", "k_cache", "v_cache", "lengths")]


def apply_cudnn(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """SDPA with its cuDNN backend only."""
    return {"out": attend_cudnn(*_given(inputs))}


def apply_flash(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """SDPA with its FlashAttention-2 backend only, for sequences that fill their cache."""
    q, k, v, _ = _given(inputs)
    queries = q if q.ndim == 4 else q[:, :, None]
    with unobserved():
        mask = causal_lower_right(queries.shape[2], k.shape[2])
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return {"out": F.scaled_dot_product_attention(queries, k, v, attn_mask=mask, enable_gqa=True).view(q.shape)}


# Without fullgraph, one failed compile makes every later flex_attention call run unfused, without an error.
@torch.compile(dynamic=False, fullgraph=True)
def _flex(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    earlier = q.shape[2] - 1

    def within(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return key < (lengths[batch] - earlier + query if earlier else lengths[batch])

    # The blocks follow from the lengths. create_block_mask would evaluate `within` at each key.
    blocks = -(-k.shape[2] // BLOCK)
    counts = ((lengths + BLOCK - 1) // BLOCK)[:, None, None]
    indices = torch.arange(blocks, dtype=torch.int32, device=q.device).expand(len(q), 1, 1, blocks)
    mask = BlockMask.from_kv_blocks(
        counts, indices, BLOCK_SIZE=BLOCK, mask_mod=within, seq_lengths=(q.shape[2], k.shape[2])
    )
    out = flex_attention(q, k, v, block_mask=mask, enable_gqa=True)
    assert isinstance(out, Tensor)  # a tuple only if auxiliary outputs are requested
    return out


def apply_flex(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """FlexAttention and its block mask, compiled by Inductor at the first call of each shape.

    The mask is part of the call, because lengths grow with every token. A query without keys gives zeros.

    More shapes in one process than `torch._dynamo.config.recompile_limit` (8) are an error: call
    `torch.compiler.reset()` between them.
    """
    q, *rest = _given(inputs)
    if q.ndim == 4:
        return {"out": _flex(q, *rest)}
    # If the compiled function added the axis, the lowering (torch 2.13) would get three axes of q instead of four.
    return {"out": _flex(q[:, :, None], *rest)[:, :, 0]}
