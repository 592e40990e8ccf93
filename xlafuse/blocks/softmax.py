"""Softmax over columns: y = exp(x - max x) / sum exp(x - max x)."""

import jax
import jax.numpy as jnp


def stages(x: jax.Array, empty_rows: bool = False) -> jax.Array:
    """Softmax of a float32 array over its last axis, in the stages max, exp, sum, divide.

    The maximum only guards against overflow and cancels in the result, so no gradient flows through it. empty_rows:
    rows of -inf alone, else NaN, give zeros.
    """
    with jax.named_scope("max"):
        largest = jax.lax.stop_gradient(jnp.max(x, axis=-1, keepdims=True))
        if empty_rows:
            largest = jnp.where(largest > -jnp.inf, largest, 0.0)
    with jax.named_scope("exp"):
        numerator = jnp.exp(x - largest)
    with jax.named_scope("sum"):
        denominator = jnp.sum(numerator, axis=-1, keepdims=True)
        if empty_rows:
            denominator = jnp.where(denominator > 0, denominator, 1.0)
    with jax.named_scope("divide"):
        return numerator / denominator


def apply(inputs: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """`x` [rows, columns] -> `y`, same shape and dtype; computed in float32."""
    x = inputs["x"]
    return {"y": stages(x.astype(jnp.float32)).astype(x.dtype)}
