"""Attention of one new token a sequence to a cache in pages: key i of sequence b is
k_pages[page_table[b, i // page_size], i % page_size]."""

import jax
import jax.numpy as jnp

from xlafuse.blocks import decode_attention


def apply(inputs: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """`q` [batch, heads, head_dim], `k_pages`, `v_pages` [pages, page_size, kv_heads, head_dim], `page_table`
    [batch, pages_per_sequence], `lengths` [batch] -> `out` as q; the pages' elements past a length must be finite.

    Pages out of range, clipped here, are not part of the contract.
    """
    q, table = inputs["q"], inputs["page_table"]

    def gathered(pages: jax.Array) -> jax.Array:
        """[batch, kv_heads, capacity, head_dim]."""
        return jnp.take(pages, table, axis=0, mode="clip").reshape(len(q), -1, *pages.shape[2:]).swapaxes(1, 2)

    with jax.named_scope("gather"):
        k, v = gathered(inputs["k_pages"]), gathered(inputs["v_pages"])
    return {"out": decode_attention.stages(q, k, v, inputs["lengths"])}
