"""A linear layer: y = x @ weight + bias."""

import jax
import jax.numpy as jnp


def apply(inputs: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """`x` [m, k], `weight` [k, n], `bias` [n] -> `y` [m, n].

    The product accumulates in float32 on a GPU and is stored in x's dtype, in which the bias is added. The bias is
    spread over the rows in float32, which changes no value, so that its gradient, a sum over rows, adds up in float32:
    XLA (jaxlib 0.10) adds float16 up in float16 on a CPU, and rounds bfloat16's partial sums for an H200.
    """
    with jax.named_scope("product"):
        product = inputs["x"] @ inputs["weight"]
    with jax.named_scope("bias"):
        spread = jnp.broadcast_to(inputs["bias"].astype(jnp.float32), product.shape)
        return {"y": product + spread.astype(product.dtype)}
