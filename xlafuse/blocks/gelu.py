"""GELU in its tanh form (Hendrycks and Gimpel, arXiv:1606.08415).

y = 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))
"""

import math

import jax
import jax.numpy as jnp


def apply(inputs: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Return gelu(x): `x` [rows, columns] -> `y`, of the same shape, computed in x's dtype."""
    x = inputs["x"]
    with jax.named_scope("gelu"):
        inner = math.sqrt(2 / math.pi) * (x + 0.044715 * (x * x * x))
        return {"y": 0.5 * x * (1 + jnp.tanh(inner))}
