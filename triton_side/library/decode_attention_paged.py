"""Attention of the newest tokens of each sequence to a cache in pages, by PyTorch.

scaled_dot_product_attention takes no page table, so the pages are gathered first. FlexAttention reads the pages in
place: its block mask lists the blocks of keys that a sequence sees.

q and out [batch, queries, heads, head_dim], or without queries, k_pages, v_pages [pages, page_size, kv_heads,
head_dim], page_table [batch, pages_per_sequence], lengths [batch]; zeros for a query that sees no key.
"""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from xlafuse.triton_side.blocks.decode_attention_paged import gathered
from xlafuse.triton_side.library.decode_attention import attend_cudnn

QUERIES = 128  # queries per block of the mask: a multiple of the tile that heads with shared keys make of the queries


def apply_cudnn(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Gather the pages, then call SDPA with its cuDNN backend only."""
    q, lengths = inputs["q"], inputs["lengths"]
    k, v = (gathered(inputs[name], inputs["page_table"]) for name in ("k_pages", "v_pages"))
    if q.ndim == 3:
        return {"out": attend_cudnn(q, k, v, lengths)}
    return {"out": attend_cudnn(q.transpose(1, 2), k, v, lengths).transpose(1, 2)}


def block_mask(page_table: Tensor, lengths: Tensor, pages: int, page_size: int, queries: int = 1) -> BlockMask:
    """Return a mask in which a page is a block, and a sequence's blocks are its row of the page table.

    vLLM's FlexAttention does the same. So does torch.nn.attention.experimental's PagedAttention, but it insists on
    allocating the pages itself.
    """
    batch, each = page_table.shape
    # The mask function gets a key's place in memory. A page of another sequence counts as after all of this one's.
    # `beyond` must not be a constant: Inductor (2.11, 2.13) would take it for all of `place` and drop the scatter.
    order = torch.arange(each, dtype=lengths.dtype, device=page_table.device).expand(batch, each)
    beyond = lengths[:, None].expand(batch, pages).contiguous()
    place = beyond.scatter(1, page_table.long(), order)

    def within(sequence: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        position = place[sequence, key // page_size] * page_size + key % page_size
        return position < (lengths[sequence] if queries == 1 else lengths[sequence] - queries + 1 + query)

    counts = (lengths + page_size - 1) // page_size
    return BlockMask.from_kv_blocks(
        counts[:, None, None], page_table[:, None, None], BLOCK_SIZE=(QUERIES, page_size), mask_mod=within,
        seq_lengths=(queries, pages * page_size), compute_q_blocks=False,
    )


# Without fullgraph, one failed compile makes every later flex_attention call run unfused, without an error.
@torch.compile(dynamic=False, fullgraph=True)
def _flex(q: Tensor, k_pages: Tensor, v_pages: Tensor, page_table: Tensor, lengths: Tensor) -> Tensor:
    pages, page_size = k_pages.shape[:2]
    mask = block_mask(page_table, lengths, pages, page_size, q.shape[2])
    k, v = (cache.flatten(0, 1).transpose(0, 1)[None] for cache in (k_pages, v_pages))
    out = flex_attention(q, k, v, block_mask=mask, enable_gqa=True)
    assert isinstance(out, Tensor)  # a tuple only if auxiliary outputs are requested
    return out


def apply_flex(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """FlexAttention and its block mask, compiled by Inductor at the first call of each shape.

    See `decode_attention.apply_flex`. It is wrong on a CPU, where the kernel confuses a block's place in memory with
    its place in the list (torch 2.13).
    """
    q, *rest = (inputs[name] for name in ("q", "k_pages", "v_pages", "page_table", "lengths"))
    if q.ndim == 4:
        return {"out": _flex(q.transpose(1, 2), *rest).transpose(1, 2)}
    return {"out": _flex(q[:, :, None], *rest)[:, :, 0]}
