"""Attention of one new token a sequence to its cache by PyTorch's fused backends.

out = softmax(q k^T / sqrt(head_dim)) v over `lengths` keys, with q and out [batch, heads, head_dim], the caches
[batch, kv_heads, capacity, head_dim]. scaled_dot_product_attention is told lengths by a mask, which FlashAttention-2
does not take (torch 2.13).
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, flex_attention

BLOCK = 128  # keys that FlexAttention's mask passes over together


def attend(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    """By the backend that SDPA may choose. Zeros where a length is 0, whatever it makes of a row without keys."""
    seen = torch.arange(k.shape[2], device=q.device) < lengths[:, None]
    out = F.scaled_dot_product_attention(q[:, :, None], k, v, attn_mask=seen[:, None, None], enable_gqa=True)
    return out[:, :, 0].masked_fill(lengths[:, None, None] == 0, 0.0)


def attend_cudnn(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    """`attend` held to the cuDNN backend, which has no CPU path: RuntimeError where it cannot take the case."""
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return attend(q, k, v, lengths)


def _given(inputs: Mapping[str, Tensor]) -> list[Tensor]:
    return [inputs[name] for name in ("q", "k_cache", "v_cache", "lengths")]


def apply_cudnn(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """SDPA held to its cuDNN backend."""
    return {"out": attend_cudnn(*_given(inputs))}


# fullgraph: without it, one failed compile makes every later flex_attention call run unfused, with no error.
@torch.compile(dynamic=False, fullgraph=True)
def _flex(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    def within(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return key < lengths[batch]

    # Written down from the lengths; create_block_mask would evaluate `within` at each key first.
    blocks = -(-k.shape[2] // BLOCK)
    counts = ((lengths + BLOCK - 1) // BLOCK)[:, None, None]
    indices = torch.arange(blocks, dtype=torch.int32, device=q.device).expand(len(q), 1, 1, blocks)
    mask = BlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=BLOCK, mask_mod=within, seq_lengths=(1, k.shape[2]))
    out = flex_attention(q, k, v, block_mask=mask, enable_gqa=True)
    assert isinstance(out, Tensor)  # a tuple where more is asked for
    return out


def apply_flex(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """FlexAttention, compiled by Inductor on the first call of each shape, with its block mask: lengths grow with every
    token, and the mask with them. A row that sees no key is zero there.

    More shapes in one process than `torch._dynamo.config.recompile_limit` (8) are an error: call
    `torch.compiler.reset()` between them.
    """
    q, *rest = _given(inputs)
    # Reshaped in the compiled function, q has three axes where the lowering (torch 2.13) wants four.
    return {"out": _flex(q[:, :, None], *rest)[:, :, 0]}
