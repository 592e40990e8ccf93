"""A linear layer under GELU, tanh approximation: y = gelu(x @ weight + bias) (Hendrycks and Gimpel,
arXiv:1606.08415)."""

import jax
import jax.numpy as jnp

from xlafuse.blocks import gelu


def apply(inputs: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """`x` [m, k], `weight` [k, n], `bias` [n] -> `y` [m, n].

    The product accumulates in float32 on a GPU and is stored in x's dtype, in which the rest is computed but the bias:
    it is added in float32. Added in bfloat16, its gradient is a bfloat16 sum over m, rounded at every term (jax 0.11.2
    on an H200, m 2048: 2 times the tolerance that a sum in float32 keeps).
    """
    with jax.named_scope("product"):
        product = inputs["x"] @ inputs["weight"]
    with jax.named_scope("bias"):
        pre = (product.astype(jnp.float32) + inputs["bias"].astype(jnp.float32)).astype(product.dtype)
    return gelu.apply({"x": pre})
