"""Attention of one new token per sequence to its cache by PyTorch's fused backends.

out = softmax(q k^T / sqrt(head_dim)) v over `lengths` keys, with q and out [batch, heads, head_dim], the caches
[batch, kv_heads, capacity, head_dim]. scaled_dot_product_attention takes the lengths as a mask. Its FlashAttention-2
backend takes no mask (torch 2.13).
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, flex_attention

BLOCK = 128  # keys per block of FlexAttention's mask


def attend(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    """Attend with the backend that SDPA chooses. The output is zero where a length is 0."""
    seen = torch.arange(k.shape[2], device=q.device) < lengths[:, None]
    out = F.scaled_dot_product_attention(q[:, :, None], k, v, attn_mask=seen[:, None, None], enable_gqa=True)
    return out[:, :, 0].masked_fill(lengths[:, None, None] == 0, 0.0)


def attend_cudnn(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    """Attend with the cuDNN backend only, which has no CPU path. Raises RuntimeError if it cannot take the case."""
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return attend(q, k, v, lengths)


def _given(inputs: Mapping[str, Tensor]) -> list[Tensor]:
    return [inputs[name] for name in ("q", "k_cache", "v_cache", "lengths")]


def apply_cudnn(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """SDPA with its cuDNN backend only."""
    return {"out": attend_cudnn(*_given(inputs))}


# Without fullgraph, one failed compile makes every later flex_attention call run unfused, without an error.
@torch.compile(dynamic=False, fullgraph=True)
def _flex(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    def within(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return key < lengths[batch]

    # The blocks follow from the lengths. create_block_mask would evaluate `within` at each key.
    blocks = -(-k.shape[2] // BLOCK)
    counts = ((lengths + BLOCK - 1) // BLOCK)[:, None, None]
    indices = torch.arange(blocks, dtype=torch.int32, device=q.device).expand(len(q), 1, 1, blocks)
    mask = BlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=BLOCK, mask_mod=within, seq_lengths=(1, k.shape[2]))
    out = flex_attention(q, k, v, block_mask=mask, enable_gqa=True)
    assert isinstance(out, Tensor)  # a tuple only if auxiliary outputs are requested
    return out


def apply_flex(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """FlexAttention and its block mask, compiled by Inductor at the first call of each shape.

    The mask is part of the call, because lengths grow with every token. A row without keys gives zeros.

    More shapes in one process than `torch._dynamo.config.recompile_limit` (8) are an error: call
    `torch.compiler.reset()` between them.
    """
    q, *rest = _given(inputs)
    # If the compiled function added the axis, the lowering (torch 2.13) would get three axes of q instead of four.
    return {"out": _flex(q[:, :, None], *rest)[:, :, 0]}
