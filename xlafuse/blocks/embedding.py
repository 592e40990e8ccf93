"""Embedding: y[t] = table[ids[t]], every id in 0 .. rows - 1."""

import jax
import jax.numpy as jnp


def apply(inputs: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Look up rows: `table` [rows, columns], `ids` [tokens] of integers -> `y` [tokens, columns] in the table's dtype.

    The lookup is float32, which changes no value but makes the gradient, a scatter-add, accumulate in float32. For a
    bfloat16 table XLA (jaxlib 0.10) would accumulate it in bfloat16 and round after each token. Inputs must not have
    ids out of range; they are clipped.
    """
    table = inputs["table"]
    with jax.named_scope("gather"):
        return {"y": jnp.take(table.astype(jnp.float32), inputs["ids"], axis=0, mode="clip").astype(table.dtype)}
