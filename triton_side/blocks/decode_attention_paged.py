"""Attention of the newest tokens of each sequence to a cache in pages.

Key i of sequence b is k_pages[page_table[b, i // page_size], i % page_size].
"""

from collections.abc import Mapping

from torch import Tensor

from xlafuse.triton_side.blocks import decode_attention
from xlafuse.triton_side.calls.stages import stage


def gathered(pages: Tensor, page_table: Tensor) -> Tensor:
    """Gather each sequence's pages: [pages, page_size, kv_heads, head_dim] -> [batch, kv_heads, capacity, head_dim]."""
    return pages[page_table].flatten(1, 2).transpose(1, 2)


def apply(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """q [batch, queries, heads, head_dim], or without queries, k_pages, v_pages [pages, page_size, kv_heads, head_dim],
    page_table [batch, pages_per_sequence], lengths [batch] -> out as q; the pages' elements past a length must be
    finite."""
    q, lengths = inputs["q"], inputs["lengths"]
    with stage("gather"):
        k, v = (gathered(inputs[name], inputs["page_table"]) for name in ("k_pages", "v_pages"))
    if q.ndim == 3:
        return {"out": decode_attention.stages(q, k, v, lengths)}
    return {"out": decode_attention.stages(q.transpose(1, 2), k, v, lengths).transpose(1, 2)}
