"""A linear layer added to the residual stream: y = residual + x @ weight."""

import jax


def apply(inputs: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Return residual + x @ weight: `x` [m, k], `weight` [k, n], `residual` [m, n] -> `y` [m, n].

    The product accumulates in float32 on a GPU and is stored in x's dtype; the residual is added in that dtype.
    """
    with jax.named_scope("product"):
        product = inputs["x"] @ inputs["weight"]
    with jax.named_scope("residual"):
        return {"y": inputs["residual"] + product}
