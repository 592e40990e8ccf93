"""FlashAttention-4's CuTe kernels (flash-attn-4, https://github.com/Dao-AILab/flash-attention), an optional package.

`apply` was tested with 4.0.0b36; `apply_packed` was written from that version's source, and `apply_decode` from the
repository's.

`flash_attn_func` and `flash_attn_varlen_func` bypass PyTorch's dispatcher (see `_operation`). This module therefore
calls the forward and backward functions that both share, from its own autograd function. They are not public API.
"""

from collections.abc import Mapping
from typing import Any

import torch
from flash_attn.cute.interface import _flash_attn_bwd, _flash_attn_fwd
from torch import Tensor
from torch.autograd.function import once_differentiable

from xlafuse.triton_side.blocks.decode_attention import zero_where_unseeing
from xlafuse.triton_side.library._operation import operation


def apply(inputs: Mapping[str, Tensor], causal: int = 1, window: int = 0) -> dict[str, Tensor]:
    """q [batch, heads, sequence, head_dim], k, v [batch, kv_heads, sequence, head_dim] -> out, float16 or bfloat16.

    The library's layout is [batch, sequence, heads, head_dim]. It reads q, k and v in place through their strides;
    `out` and the gradients are views of that layout.
    """
    q, k, v = (inputs[name].transpose(1, 2) for name in "qkv")
    return {"out": _attend(q, k, v, bool(causal), window, None, 0).transpose(1, 2)}


def apply_packed(inputs: Mapping[str, Tensor], longest: int) -> dict[str, Tensor]:
    """q [tokens, heads, head_dim], k, v [tokens, kv_heads, head_dim], cu_seqlens [sequences + 1] int32 -> out; causal.

    q, k and v are float16 or bfloat16. longest: the length of the longest sequence.
    """
    return {"out": _attend(inputs["q"], inputs["k"], inputs["v"], True, 0, inputs["cu_seqlens"], longest)}


def apply_decode(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """q [batch, heads, queries, head_dim], or without queries, k_cache, v_cache [batch, kv_heads, capacity, head_dim],
    lengths [batch] int32 -> out as q, zero for a query that sees no key; float16 or bfloat16.

    The library's causal mask is aligned to the last key. On Hopper GPUs its kernel splits no keys and reads no pages.
    """
    q, lengths = inputs["q"], inputs["lengths"]
    queries = q if q.ndim == 4 else q[:, :, None]
    k, v = (inputs[name].transpose(1, 2) for name in ("k_cache", "v_cache"))
    out = _decode(queries.transpose(1, 2), k, v, lengths).transpose(1, 2).reshape(q.shape)
    return {"out": zero_where_unseeing(out, lengths)}


@operation("flash_attention_4_decode")
def _decode(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    out: Tensor = _flash_attn_fwd(q, k, v, seqused_k=lengths, causal=True)[0]
    return out


def _attend(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int, cu_seqlens: Tensor | None, longest: int
) -> Tensor:
    save = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (q, k, v))
    out: Tensor = _Attention.apply(q, k, v, causal, window, cu_seqlens, longest, save)
    return out


@operation("flash_attention_4")
def _forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int, cu_seqlens: Tensor | None, longest: int, save: bool
) -> list[Tensor]:
    arguments = _mask_arguments(causal, window, cu_seqlens, longest)
    out, lse, *_ = _flash_attn_fwd(q, k, v, **arguments, return_lse=save)
    return [out, lse] if save else [out]


@operation("flash_attention_4_backward")
def _backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, lse: Tensor, causal: bool, window: int,
    cu_seqlens: Tensor | None, longest: int,
) -> list[Tensor]:
    dq, dk, dv = _flash_attn_bwd(q, k, v, out, dout, lse, **_mask_arguments(causal, window, cu_seqlens, longest))
    return [dq, dk, dv]


def _mask_arguments(causal: bool, window: int, cu_seqlens: Tensor | None, longest: int) -> dict[str, Any]:
    """Return the library's arguments that say which keys a query sees. A window size of None means all earlier keys."""
    return {
        "causal": causal, "window_size_left": window - 1 if window else None,
        "cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens,
        "max_seqlen_q": longest or None, "max_seqlen_k": longest or None,
    }


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int, cu_seqlens: Tensor | None, longest: int,
        save: bool,
    ) -> Tensor:
        out, *saved = _forward(q, k, v, causal, window, cu_seqlens, longest, save)
        ctx.save_for_backward(q, k, v, out, cu_seqlens, *saved)
        ctx.others = causal, window, longest
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, cu_seqlens, lse = ctx.saved_tensors
        causal, window, longest = ctx.others
        gradients = _backward(q, k, v, out, dout, lse, causal, window, cu_seqlens, longest)
        return *gradients, None, None, None, None, None
