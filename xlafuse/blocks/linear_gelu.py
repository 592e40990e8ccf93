"""A linear layer followed by GELU in its tanh form: y = gelu(x @ weight + bias) (arXiv:1606.08415)."""

import jax

from xlafuse.blocks import gelu, linear


def apply(inputs: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Return gelu(x @ weight + bias): `x` [m, k], `weight` [k, n], `bias` [n] -> `y` [m, n].

    The product accumulates in float32 on a GPU and is stored in x's dtype. The rest is computed in x's dtype, as
    flax.nnx.Linear and jax.nn.gelu do. So the bias's gradient is a sum in that dtype.
    """
    return gelu.apply({"x": linear.apply(inputs)["y"]})
