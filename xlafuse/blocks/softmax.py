"""Softmax over columns: y = exp(x - max x) / sum exp(x - max x); a row of only -inf gives zeros."""

import jax
import jax.numpy as jnp


def softmax(x: jax.Array, empty_rows: bool = False) -> jax.Array:
    """Return the softmax of a float32 array over its last axis, in the stages max, exp, sum, divide.

    The maximum only guards against overflow and cancels in the result, so no gradient flows through it. empty_rows:
    rows of only -inf, else NaN, give zeros and have zero gradients (for cotangents below 2^77).

    With empty_rows, the maximum is taken over elements clamped to the lowest finite number, and 2^-50 is added to every
    exponential before the sum. The sum of an empty row is then not zero. Other sums do not change: each is at least 1,
    with a last place of 2^-23.

    Alternatives are worse, compiled for an H200. Two selects split XLA's single kernel: the forward pass takes 5
    kernels at 1024 columns. An operation on each row's maximum or sum is a separate kernel in long rows (7 instead of 5
    at 32,768 columns). A reduction cannot start at the lowest finite number: XLA's Triton code pads rows with the start
    value, as if it were neutral.
    """
    with jax.named_scope("max"):
        clamped = jnp.maximum(x, jnp.finfo(jnp.float32).min) if empty_rows else x
        largest = jax.lax.stop_gradient(jnp.max(clamped, axis=-1, keepdims=True))
    with jax.named_scope("exp"):
        numerator = jnp.exp(x - largest)
    with jax.named_scope("sum"):
        denominator = jnp.sum(numerator + 2.0**-50 if empty_rows else numerator, axis=-1, keepdims=True)
    with jax.named_scope("divide"):
        return numerator / denominator


def apply(inputs: dict[str, jax.Array], masked: int = 0) -> dict[str, jax.Array]:
    """Return the softmax: `x` [rows, columns] -> `y`, of the same shape and dtype, computed in float32.

    masked: the number of rows of only -inf. If it is 0, the plain formula is used.
    """
    x = inputs["x"]
    return {"y": softmax(x.astype(jnp.float32), empty_rows=masked > 0).astype(x.dtype)}
