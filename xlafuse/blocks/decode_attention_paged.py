"""Attention of the newest tokens of each sequence to a paged cache.

Key i of sequence b is k_pages[page_table[b, i // page_size], i % page_size].
"""

from typing import Literal

import jax
import jax.numpy as jnp

from xlafuse.blocks import decode_attention


def gather_pages(pages: jax.Array, table: jax.Array) -> jax.Array:
    """Return the cache, [batch, capacity, kv_heads, head_dim]; valid inputs have no page out of range."""
    return jnp.take(pages, table, axis=0, mode="clip").reshape(len(table), -1, *pages.shape[2:])


def apply(inputs: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Return attention to a paged cache.

    `q` [batch, queries, heads, head_dim], or without queries, `k_pages`, `v_pages` [pages, page_size, kv_heads,
    head_dim], `page_table` [batch, pages_per_sequence], `lengths` [batch] -> `out`, of q's shape. The pages' elements
    past a length must be finite.
    """
    q, lengths = inputs["q"], inputs["lengths"]
    with jax.named_scope("gather"):
        k, v = (gather_pages(inputs[name], inputs["page_table"]).swapaxes(1, 2) for name in ("k_pages", "v_pages"))
    if q.ndim == 3:
        return {"out": decode_attention.attend(q, k, v, lengths)}
    return {"out": decode_attention.attend(q.swapaxes(1, 2), k, v, lengths).swapaxes(1, 2)}


def apply_cudnn(
    inputs: dict[str, jax.Array], implementation: Literal["cudnn", "xla"] = "cudnn"
) -> dict[str, jax.Array]:
    """Return the same through cuDNN's fused attention, after gathering the pages.

    `jax.nn.dot_product_attention` takes no page table (jax 0.11.2), and takes gathered pages without a copy. It needs a
    GPU (or a target) with cuDNN, and bfloat16 or float16. `implementation` is passed to that function. Its causal mask
    is aligned to the first key, so several queries pass a mask, which becomes a bias.
    """
    q, lengths = inputs["q"], inputs["lengths"]
    with jax.named_scope("gather"):
        k, v = (gather_pages(inputs[name], inputs["page_table"]) for name in ("k_pages", "v_pages"))
    with jax.named_scope("attention"):
        if q.ndim == 3:
            out = jax.nn.dot_product_attention(
                q[:, None], k, v, key_value_seq_lengths=lengths, implementation=implementation
            )[:, 0]
            return {"out": decode_attention.zero_where_unseeing(out, lengths)}
        mask = decode_attention.visible_keys(q.shape[1], lengths, k.shape[1])[:, None]
        out = jax.nn.dot_product_attention(q, k, v, mask=mask, implementation=implementation)
        return {"out": decode_attention.zero_where_unseeing(out.swapaxes(1, 2), lengths).swapaxes(1, 2)}
