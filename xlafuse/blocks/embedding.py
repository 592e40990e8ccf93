"""Embedding: y[t] = table[ids[t]], every id in 0 .. rows - 1."""

import jax
import jax.numpy as jnp


def apply(inputs: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Look up rows: `table` [rows, columns], `ids` [tokens] of integers -> `y` [tokens, columns] in the table's dtype.

    flax.nnx.Embed makes the same lookup. Its gradient is a scatter-add in the table's dtype, rounded after each token.
    Inputs must not have ids out of range; they are clipped, which takes one kernel less than jnp.take's default, NaN.
    """
    with jax.named_scope("gather"):
        return {"y": jnp.take(inputs["table"], inputs["ids"], axis=0, mode="clip")}
