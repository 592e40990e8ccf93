"""Attention of a sequence's newest tokens to a cache in pages, as in vLLM (Kwon et al., PagedAttention, arXiv
2309.06180).

Key i of sequence b is k_pages[page_table[b, i // page_size], i % page_size]. The kernels are in decode_attention.py;
they take pages with the two inner axes swapped: heads, then keys.
"""

import torch

from xlafuse.triton_side.kernels.decode_attention import check_indices, check_query, launch
from xlafuse.triton_side.kernels.shared.launch import check_tensors


def decode_attention_paged(
    q: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, page_table: torch.Tensor, lengths: torch.Tensor
) -> torch.Tensor:
    """Return softmax(q k^T / sqrt(head_dim)) v over the first `lengths` keys of each sequence, not differentiable.

    Several queries are the last tokens of each sequence: query i of n sees the first length - n + 1 + i keys.

    Args:
        q: [batch, heads, head_dim], bfloat16, float16 or float32: one token a sequence; or [batch, queries, heads,
            head_dim], in which all heads of a token are contiguous. The size of a tile is that of `decode_attention`.
        k_pages, v_pages: [pages, page_size, kv_heads, head_dim] of q's dtype, of any strides. Consecutive query heads
            share a kv head.
        page_table: [batch, pages_per_sequence], int32, the pages of each sequence in order. Pages past its length are
            not read; all others must be in 0 .. pages - 1, which is not checked.
        lengths: [batch], int32, not checked. A length above pages_per_sequence * page_size counts as that, one below 1
            as 0.

    Returns:
        out of q's shape, contiguous, in q's dtype; zeros for a query that sees no key.

    Raises:
        ValueError: the shapes or devices do not fit, head_dim is not 16, 32, 64 or 128, the tensors are not on a GPU
            (outside the interpreter), or float32 products are set to "medium".
        TypeError: a dtype is not supported, or they differ.
    """
    check_tensors(q=q, k_pages=k_pages, v_pages=v_pages)
    if k_pages.ndim != 4 or k_pages.shape != v_pages.shape or k_pages.shape[-1] != q.shape[-1]:
        raise ValueError(
            "k_pages and v_pages must be [pages, page_size, kv_heads, head_dim] of q's head_dim, got "
            f"{tuple(k_pages.shape)} and {tuple(v_pages.shape)} for q {tuple(q.shape)}"
        )
    check_query(q, ("batch", "queries", "heads", "head_dim"), k_pages.shape[2], lengths)
    check_indices("page_table", page_table, q, ("batch", "pages_per_sequence"))
    k, v = k_pages.transpose(1, 2), v_pages.transpose(1, 2)
    return launch(q, k, v, lengths.contiguous(), page_table.contiguous())


def apply(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Run the block `decode_attention_paged`: q, k_pages, v_pages, page_table, lengths -> out."""
    names = ("q", "k_pages", "v_pages", "page_table", "lengths")
    return {"out": decode_attention_paged(*(inputs[name] for name in names))}
