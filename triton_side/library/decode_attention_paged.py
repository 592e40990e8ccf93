"""Attention of one new token a sequence to a cache in pages: gathered first, as PyTorch's attention takes no pages but
by torch.nn.attention.varlen's block_table (torch 2.12 on), whose FlashAttention-2 wants multiples of 256 keys a page."""

from collections.abc import Mapping

from torch import Tensor

from triton_side.blocks.decode_attention_paged import gathered
from triton_side.library.decode_attention import attend


def apply(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """q [batch, heads, head_dim], k_pages, v_pages [pages, page_size, kv_heads, head_dim], page_table
    [batch, pages_per_sequence], lengths [batch] -> out as q; zeros where a length is 0."""
    k, v = (gathered(inputs[name], inputs["page_table"]) for name in ("k_pages", "v_pages"))
    return {"out": attend(inputs["q"], k, v, inputs["lengths"])}
