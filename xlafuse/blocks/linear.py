"""A linear layer: y = x @ weight + bias."""

import jax
import jax.numpy as jnp


def broadcast_in_float32(vector: jax.Array, rows: jax.Array) -> jax.Array:
    """Broadcast a bias or weight over rows, through float32, to the dtype to which both promote.

    The detour changes no value, but the gradient, a sum over rows, accumulates in float32. Otherwise XLA (jaxlib 0.10)
    adds float16 in float16 on a CPU, and rounds partial sums to bfloat16 or float16 for an H200.
    """
    return jnp.broadcast_to(vector.astype(jnp.float32), rows.shape).astype(jnp.promote_types(vector.dtype, rows.dtype))


def apply(inputs: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Return x @ weight + bias: `x` [m, k], `weight` [k, n], `bias` [n] -> `y` [m, n].

    The product accumulates in float32 on a GPU and is stored in x's dtype; the bias is added in that dtype.
    """
    with jax.named_scope("product"):
        product = inputs["x"] @ inputs["weight"]
    with jax.named_scope("bias"):
        return {"y": product + broadcast_in_float32(inputs["bias"], product)}
