"""out = x + y, elementwise: the block whose every byte is compulsory."""

import jax


def apply(inputs: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """`x`, `y` of shape [elements] -> `out` of the same shape and dtype, added in that dtype."""
    with jax.named_scope("add"):
        return {"out": inputs["x"] + inputs["y"]}
