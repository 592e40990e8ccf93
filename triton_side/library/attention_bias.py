"""Attention with an additive bias by PyTorch: two SDPA backends, which take the bias as a mask, and FlexAttention.

out = softmax(q k^T / sqrt(head_dim) + bias) v, with q, k, v and out [batch, heads, sequence, head_dim], bias [heads,
sequence, sequence]. No backend falls back to another.

- SDPA's FlashAttention takes no mask.
- cuDNN takes a mask but gives it no gradient (_scaled_dot_product_cudnn_attention_backward, torch 2.13).
- The memory-efficient kernels give one bias gradient per batch element, and autograd sums them.
- FlexAttention sums them in place, with atomics.
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention


def apply_efficient(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """SDPA with its memory-efficient backend only, which has no CPU path."""
    return _sdpa(inputs, SDPBackend.EFFICIENT_ATTENTION)


def apply_cudnn(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """SDPA with its cuDNN backend only, which has no CPU path. Raises RuntimeError if the bias requires grad."""
    return _sdpa(inputs, SDPBackend.CUDNN_ATTENTION)


def _sdpa(inputs: Mapping[str, Tensor], backend: SDPBackend) -> dict[str, Tensor]:
    q, k, v = inputs["q"], inputs["k"], inputs["v"]
    with sdpa_kernel(backend):
        return {"out": F.scaled_dot_product_attention(q, k, v, attn_mask=inputs["bias"][None])}


# Without fullgraph, one failed compile makes every later flex_attention call run unfused, without an error.
@torch.compile(dynamic=False, fullgraph=True)
def _flex(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    def biased(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return score + bias[head, query, key]

    out = flex_attention(q, k, v, score_mod=biased)
    assert isinstance(out, Tensor)  # a tuple only if auxiliary outputs are requested
    return out


def apply_flex(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """FlexAttention, compiled by Inductor at the first call of each shape; see `attention.apply_flex`."""
    return {"out": _flex(*(inputs[name] for name in ("q", "k", "v", "bias")))}
