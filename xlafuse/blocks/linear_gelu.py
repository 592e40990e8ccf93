"""A linear layer under GELU, tanh approximation: y = gelu(x @ weight + bias) (Hendrycks and Gimpel,
arXiv:1606.08415)."""

import jax

from xlafuse.blocks import gelu


def apply(inputs: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """`x` [m, k], `weight` [k, n], `bias` [n] -> `y` [m, n].

    The product accumulates in float32 on a GPU and is stored in x's dtype, in which the rest is computed.
    """
    with jax.named_scope("product"):
        product = inputs["x"] @ inputs["weight"]
    with jax.named_scope("bias"):
        pre = product + inputs["bias"]
    return gelu.apply({"x": pre})
