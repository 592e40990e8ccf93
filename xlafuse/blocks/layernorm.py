"""LayerNorm: y = (x - mean(x)) * rsqrt(var(x) + eps) * weight + bias (Ba, Kiros and Hinton, arXiv:1607.06450)."""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx


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


def apply_flax(inputs: dict[str, jax.Array], *, eps: float) -> dict[str, jax.Array]:
    """Return the same by flax.nnx.LayerNorm.

    Its variance is mean(x^2) - mean(x)^2, so one pass over x gives both sums. It errs more where the mean is far from
    zero. In backward it lets XLA compute the norm again in one pass less; in forward it takes one more.
    """
    weights: Any = {("scale",): nnx.Param(inputs["weight"]), ("bias",): nnx.Param(inputs["bias"])}
    with jax.named_scope("normalize"):
        norm = nnx.merge(_flax_graph(inputs["x"].shape[-1], eps), nnx.from_flat_state(weights))
        return {"y": norm(inputs["x"])}


@cache
def _flax_graph(columns: int, eps: float) -> Any:
    """Return the module without its weights; they are never allocated."""
    return nnx.graphdef(nnx.eval_shape(lambda: nnx.LayerNorm(columns, epsilon=eps, rngs=nnx.Rngs(0))))
