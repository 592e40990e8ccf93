"""The matrix product: c = a @ b."""

import jax


def apply(inputs: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Return a @ b: `a` [m, k], `b` [k, n] -> `c` [m, n], accumulated in float32 on a GPU, stored in a's dtype."""
    with jax.named_scope("product"):
        return {"c": inputs["a"] @ inputs["b"]}
