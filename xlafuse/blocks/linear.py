"""A linear layer: y = x @ weight + bias."""

import jax


def apply(inputs: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Return x @ weight + bias: `x` [m, k], `weight` [k, n], `bias` [n] -> `y` [m, n].

    The product accumulates in float32 on a GPU and is stored in x's dtype; the bias is added in that dtype, as
    flax.nnx.Linear does. So the bias's gradient is a sum in that dtype.
    """
    with jax.named_scope("product"):
        product = inputs["x"] @ inputs["weight"]
    with jax.named_scope("bias"):
        return {"y": product + inputs["bias"]}
