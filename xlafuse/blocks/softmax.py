"""Softmax over columns: y = exp(x - max x) / sum exp(x - max x); zeros for a row of -inf alone."""

import jax
import jax.numpy as jnp


def softmax(x: jax.Array, empty_rows: bool = False) -> jax.Array:
    """Softmax of a float32 array over its last axis, in the stages max, exp, sum, divide.

    The maximum only guards against overflow and cancels in the result, so no gradient flows through it. empty_rows:
    rows of -inf alone, else NaN, give zeros and have zero gradients (of cotangents below 2^77).

    For them no element is below the lowest finite number where the maximum is taken, and 2^-50 is added to every
    exponential on its way into the sum, which alone it keeps from zero: any other sum is at least 1, and its last place
    2^-23. Two selects instead break up what XLA makes one kernel of (compiled for an H200, 5 kernels of the forward
    pass at 1024 columns), and what is done once a row to maximum or sum is a kernel of its own where rows are long
    (32,768 columns: 7 for 5). A reduction that begins at that number is no way: XLA's Triton code takes it for neutral,
    and pads rows with it.
    """
    with jax.named_scope("max"):
        seen = jnp.maximum(x, jnp.finfo(jnp.float32).min) if empty_rows else x
        largest = jax.lax.stop_gradient(jnp.max(seen, axis=-1, keepdims=True))
    with jax.named_scope("exp"):
        numerator = jnp.exp(x - largest)
    with jax.named_scope("sum"):
        denominator = jnp.sum(numerator + 2.0**-50 if empty_rows else numerator, axis=-1, keepdims=True)
    with jax.named_scope("divide"):
        return numerator / denominator


def apply(inputs: dict[str, jax.Array], masked: int = 0) -> dict[str, jax.Array]:
    """`x` [rows, columns] -> `y`, same shape and dtype; computed in float32. masked: how many rows are -inf alone;
    where none is, the formula is the plain one."""
    x = inputs["x"]
    return {"y": softmax(x.astype(jnp.float32), empty_rows=masked > 0).astype(x.dtype)}
