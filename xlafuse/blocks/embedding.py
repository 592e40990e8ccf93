"""Embedding: y[t] = table[ids[t]], every id in 0 .. rows - 1."""

import jax
import jax.numpy as jnp


def apply(inputs: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """`table` [rows, columns], `ids` [tokens] of integers -> `y` [tokens, columns] in the table's dtype.

    Looked up in float32, which changes no value, so that the gradient, a scatter-add, adds up in float32: of a bfloat16
    table XLA (jaxlib 0.10) adds it up in bfloat16, and rounds after each token. Ids out of range, clipped here, are not
    part of the contract.
    """
    table = inputs["table"]
    with jax.named_scope("gather"):
        return {"y": jnp.take(table.astype(jnp.float32), inputs["ids"], axis=0, mode="clip").astype(table.dtype)}
