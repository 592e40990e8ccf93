"""Attention by PyTorch's fused backends: FlashAttention, memory-efficient kernels, cuDNN and FlexAttention.

out = softmax(masked(q k^T / sqrt(head_dim))) v, with q and out [batch, heads, sequence, head_dim], k and v
[batch, kv_heads, sequence, head_dim]. No backend falls back to another: a case that it cannot take is an error.
Choosing an SDPA backend costs 11 us of host time per call (`sdpa_kernel`, torch 2.13).
"""

from collections.abc import Mapping
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention


def apply_flash(inputs: Mapping[str, Tensor], causal: int = 1, window: int = 0) -> dict[str, Tensor]:
    """SDPA with its FlashAttention backend only: FlashAttention-2 on CUDA, SDPA's own flash kernel on a CPU.

    SDPA pads a head_dim that is no multiple of 8, which copies q, k and v. Raises RuntimeError if the backend cannot
    take the case, ValueError for a window.
    """
    return _sdpa(inputs, SDPBackend.FLASH_ATTENTION, causal, window)


def apply_efficient(inputs: Mapping[str, Tensor], causal: int = 1, window: int = 0) -> dict[str, Tensor]:
    """SDPA with its memory-efficient backend only, which has no CPU path.

    Raises RuntimeError if the backend cannot take the case, such as shared heads; ValueError for a window.
    """
    return _sdpa(inputs, SDPBackend.EFFICIENT_ATTENTION, causal, window)


def apply_cudnn(inputs: Mapping[str, Tensor], causal: int = 1, window: int = 0) -> dict[str, Tensor]:
    """SDPA with its cuDNN backend only, which has no CPU path.

    Raises RuntimeError if the backend cannot take the case, ValueError for a window.
    """
    return _sdpa(inputs, SDPBackend.CUDNN_ATTENTION, causal, window)


def _sdpa(inputs: Mapping[str, Tensor], backend: SDPBackend, causal: int, window: int) -> dict[str, Tensor]:
    if window:
        raise ValueError(f"scaled_dot_product_attention has no window, got {window}; use FlexAttention")
    q, k, v = inputs["q"], inputs["k"], inputs["v"]
    with sdpa_kernel(backend):
        return {
            "out": F.scaled_dot_product_attention(
                q, k, v, is_causal=bool(causal), enable_gqa=q.shape[1] != k.shape[1]
            )
        }


def apply_flex(inputs: Mapping[str, Tensor], causal: int = 1, window: int = 0) -> dict[str, Tensor]:
    """FlexAttention, with a block mask if causal. Inductor compiles it at the first call of each shape.

    A mask is made once per sequence length, window and device, and cached. On a CPU there is a forward but no backward.
    More shapes in one process than `torch._dynamo.config.recompile_limit` (8) are an error: call
    `torch.compiler.reset()` between them.
    """
    q = inputs["q"]
    return {"out": flex(q, inputs["k"], inputs["v"], _block_mask(q.shape[-2], window, q.device) if causal else None)}


# Without fullgraph, one failed compile makes every later flex_attention call run unfused, without an error.
@torch.compile(dynamic=False, fullgraph=True)
def flex(q: Tensor, k: Tensor, v: Tensor, block_mask: BlockMask | None) -> Tensor:
    return flex_attention(q, k, v, block_mask=block_mask, enable_gqa=q.shape[1] != k.shape[1])


@cache
def _block_mask(sequence: int, window: int, device: torch.device) -> BlockMask:
    def within(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (query - key < window)

    seen = within if window else _causal
    return create_block_mask(seen, B=None, H=None, Q_LEN=sequence, KV_LEN=sequence, device=device)


def _causal(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return query >= key
