"""Elementwise addition, out = x + y; all its bytes are compulsory."""

import jax


def apply(inputs: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Return x + y: `x`, `y` [elements] -> `out`, of the same shape and dtype, added in that dtype."""
    with jax.named_scope("add"):
        return {"out": inputs["x"] + inputs["y"]}
