"""Causal attention of packed sequences in PyTorch: its varlen interface, and FlexAttention with a document mask.

q and out are [tokens, heads, head_dim], k and v [tokens, kv_heads, head_dim], cu_seqlens [sequences + 1] of int32.
Neither function falls back to the other.
"""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from torch.nn.attention.varlen import varlen_attn
from torch.utils.weak import WeakIdKeyDictionary

from xlafuse.triton_side.library.attention import flex

# torch 2.12 rejects fewer key heads than query heads without this argument. Versions that lack it accept them.
_GQA: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
_masks: WeakIdKeyDictionary = WeakIdKeyDictionary()


def apply_varlen(inputs: Mapping[str, Tensor], longest: int) -> dict[str, Tensor]:
    """Return attention by FlashAttention-2 (torch.nn.attention.varlen). It needs a GPU, and bfloat16 or float16.

    longest: the length of the longest sequence, which determines the kernel's grid.
    """
    cu_seqlens = inputs["cu_seqlens"]
    arguments = (inputs["q"], inputs["k"], inputs["v"], cu_seqlens, cu_seqlens, longest, longest)
    out = varlen_attn(*arguments, window_size=(-1, 0), **_GQA)
    assert isinstance(out, Tensor)  # varlen_attn returns a pair only with return_aux
    return {"out": out}


def apply_flex(inputs: Mapping[str, Tensor], longest: int) -> dict[str, Tensor]:
    """Return attention by compiled FlexAttention with a mask of cu_seqlens.

    The mask is cached until cu_seqlens changes, as in a model whose layers share one mask.
    """
    q, k, v = (inputs[name].transpose(0, 1).unsqueeze(0) for name in "qkv")
    return {"out": flex(q, k, v, _mask_of(inputs["cu_seqlens"], q.shape[2])).squeeze(0).transpose(0, 1)}


def _mask_of(cu_seqlens: Tensor, tokens: int) -> BlockMask:
    version, mask = _masks.get(cu_seqlens, (None, None))
    if version != cu_seqlens._version:
        position = torch.arange(tokens, device=cu_seqlens.device)
        sequence = (cu_seqlens[1:] <= position[:, None]).sum(dim=1)

        def is_visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (sequence[query] == sequence[key]) & (query >= key)

        mask = create_block_mask(is_visible, None, None, tokens, tokens, device=cu_seqlens.device)
        _masks[cu_seqlens] = cu_seqlens._version, mask
    return mask
