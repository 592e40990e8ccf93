"""FlashAttention-4's CuTe kernels (flash-attn-4, https://github.com/Dao-AILab/flash-attention), an optional package:
tested with 4.0.0b36.

`flash_attn_func` launches past PyTorch's dispatcher, so its two halves, which are not public API, are called from an
autograd function of our own (see `_operation`), as its own does.
"""

from collections.abc import Mapping
from typing import Any

import torch
from flash_attn.cute.interface import _flash_attn_bwd, _flash_attn_fwd
from torch import Tensor
from torch.autograd.function import once_differentiable

from triton_side.library._operation import operation


def apply(inputs: Mapping[str, Tensor], causal: int = 1, window: int = 0) -> dict[str, Tensor]:
    """q [batch, heads, sequence, head_dim], k, v [batch, kv_heads, sequence, head_dim] -> out, float16 or bfloat16.

    Its own layout is [batch, sequence, heads, head_dim]: q, k and v are read in place through their strides, and `out`
    and the gradients are views of that layout.
    """
    q, k, v = inputs["q"], inputs["k"], inputs["v"]
    save = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (q, k, v))
    out = _Attention.apply(*(tensor.transpose(1, 2) for tensor in (q, k, v)), bool(causal), window, save)
    return {"out": out.transpose(1, 2)}


@operation("flash_attention_4")
def _forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int, save: bool) -> list[Tensor]:
    out, lse, *_ = _flash_attn_fwd(q, k, v, causal=causal, window_size_left=_before(window), return_lse=save)
    return [out, lse] if save else [out]


@operation("flash_attention_4_backward")
def _backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, lse: Tensor, causal: bool, window: int
) -> list[Tensor]:
    dq, dk, dv = _flash_attn_bwd(q, k, v, out, dout, lse, causal=causal, window_size_left=_before(window))
    return [dq, dk, dv]


def _before(window: int) -> int | None:
    """How many keys before its own a query sees, as these functions are told; None: all of them."""
    return window - 1 if window else None


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int, save: bool) -> Tensor:
        out, *saved = _forward(q, k, v, causal, window, save)
        ctx.save_for_backward(q, k, v, out, *saved)
        ctx.mask = causal, window
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        return *_backward(q, k, v, out, dout, lse, *ctx.mask), None, None, None
