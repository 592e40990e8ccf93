"""A bias added to the rows of a matrix, then GELU in its tanh form: y = gelu(x + bias)."""

import jax

from xlafuse.blocks import gelu


def apply(inputs: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Return gelu(x + bias): `x` [rows, columns], `bias` [columns] -> `y` [rows, columns], computed in x's dtype."""
    with jax.named_scope("bias"):
        z = inputs["x"] + inputs["bias"]
    return gelu.apply({"x": z})
