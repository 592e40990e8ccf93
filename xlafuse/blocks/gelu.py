"""GELU, tanh approximation: y = 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))) (Hendrycks and Gimpel,
arXiv:1606.08415)."""

import math

import jax
import jax.numpy as jnp


def apply(inputs: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """`x` [rows, columns] -> `y`, same shape; every operation written out and in x's dtype."""
    x = inputs["x"]
    with jax.named_scope("gelu"):
        inner = math.sqrt(2 / math.pi) * (x + 0.044715 * (x * x * x))
        return {"y": 0.5 * x * (1 + jnp.tanh(inner))}
