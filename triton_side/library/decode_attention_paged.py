"""Attention of one new token a sequence to a cache in pages: gathered first, as scaled_dot_product_attention takes no
page table."""

from collections.abc import Mapping

from torch import Tensor

from triton_side.blocks.decode_attention_paged import gathered
from triton_side.library.decode_attention import attend_cudnn


def apply_cudnn(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """q [batch, heads, head_dim], k_pages, v_pages [pages, page_size, kv_heads, head_dim], page_table
    [batch, pages_per_sequence], lengths [batch] -> out as q; zeros where a length is 0."""
    k, v = (gathered(inputs[name], inputs["page_table"]) for name in ("k_pages", "v_pages"))
    return {"out": attend_cudnn(inputs["q"], k, v, inputs["lengths"])}
