"""LayerNorm: y = (x - mean(x)) * rsqrt(var(x) + eps) * weight + bias (Ba, Kiros and Hinton, arXiv:1607.06450)."""

import jax
import jax.numpy as jnp


def apply(inputs: dict[str, jax.Array], *, eps: float) -> dict[str, jax.Array]:
    """Return the norm: `x` [rows, columns], `weight`, `bias` [columns] -> `y` [rows, columns] in x's dtype.

    All of it is float32, including weight and bias. The variance is computed from x minus its mean, and `eps` is added.
    """
    x = inputs["x"]
    with jax.named_scope("mean"):
        wide = x.astype(jnp.float32)
        mean = jnp.mean(wide, axis=-1, keepdims=True)
    with jax.named_scope("variance"):
        centred = wide - mean
        variance = jnp.mean(centred * centred, axis=-1, keepdims=True)
    with jax.named_scope("normalize"):
        normalized = centred * jax.lax.rsqrt(variance + eps)
    with jax.named_scope("weight"):
        scaled = normalized * inputs["weight"].astype(jnp.float32)
    with jax.named_scope("bias"):
        return {"y": (scaled + inputs["bias"].astype(jnp.float32)).astype(x.dtype)}
