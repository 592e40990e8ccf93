"""Causal attention by PyTorch's fused backends: FlashAttention, cuDNN and FlexAttention.

out = softmax(causal(q k^T / sqrt(head_dim))) v, with q, k, v and out [batch, heads, sequence, head_dim].
None of the three falls back to another: what a backend cannot take is an error. Choosing an SDPA backend
costs 11 us of host time a call (`sdpa_kernel`, torch 2.13).
"""

from collections.abc import Mapping
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention


def apply_flash(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """SDPA held to its FlashAttention backend: FlashAttention-2 on CUDA, SDPA's own flash kernel on a CPU.

    A head_dim that is no multiple of 8 is padded by SDPA, which copies q, k and v. Raises RuntimeError
    where the backend cannot take the case.
    """
    return _sdpa(inputs, SDPBackend.FLASH_ATTENTION)


def apply_cudnn(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """SDPA held to its cuDNN backend, which has no CPU path.

    Raises RuntimeError where the backend cannot take the case.
    """
    return _sdpa(inputs, SDPBackend.CUDNN_ATTENTION)


def _sdpa(inputs: Mapping[str, Tensor], backend: SDPBackend) -> dict[str, Tensor]:
    with sdpa_kernel(backend):
        return {"out": F.scaled_dot_product_attention(inputs["q"], inputs["k"], inputs["v"], is_causal=True)}


def apply_flex(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """FlexAttention with a causal block mask, compiled by Inductor on the first call of each shape.

    The mask is made once per sequence length and device and kept. On a CPU there is a forward but no
    backward. More shapes in one process than `torch._dynamo.config.recompile_limit` (8) are an error: call
    `torch.compiler.reset()` between them.
    """
    q = inputs["q"]
    return {"out": _flex(q, inputs["k"], inputs["v"], _causal_block_mask(q.shape[-2], q.device))}


# fullgraph: without it, one failed compile makes every later flex_attention call run unfused, with no error.
@torch.compile(dynamic=False, fullgraph=True)
def _flex(q: Tensor, k: Tensor, v: Tensor, block_mask: BlockMask) -> Tensor:
    return flex_attention(q, k, v, block_mask=block_mask)


@cache
def _causal_block_mask(sequence: int, device: torch.device) -> BlockMask:
    return create_block_mask(_causal, B=None, H=None, Q_LEN=sequence, KV_LEN=sequence, device=device)


def _causal(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return query >= key
