"""One step of AdamW (Loshchilov and Hutter, arXiv:1711.05101) with bias correction."""

from typing import Any

import jax
import jax.numpy as jnp


def adamw(
    param: jax.Array, gradient: jax.Array, mu: jax.Array, nu: jax.Array, step: jax.Array,
    *, rate: float, beta1: float, beta2: float, eps: float, decay: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return (param, mu, nu) after step number `step`, an integer from 1.

    The step is computed in float32; param keeps its dtype, mu and nu are float32.
    """
    with jax.named_scope("mu"):
        g = gradient.astype(jnp.float32)
        mu = beta1 * mu + (1 - beta1) * g
    with jax.named_scope("nu"):
        nu = beta2 * nu + (1 - beta2) * g * g
    with jax.named_scope("update"):
        p, t = param.astype(jnp.float32), step.astype(jnp.float32)
        change = mu / (1 - beta1**t) / (jnp.sqrt(nu / (1 - beta2**t)) + eps)
        return (p - rate * (change + decay * p)).astype(param.dtype), mu, nu


def apply(inputs: dict[str, jax.Array], **attributes: Any) -> dict[str, jax.Array]:
    """Return one step of AdamW.

    `param`, `gradient` [elements], `mu`, `nu` [elements] float32, `step` [] int32 -> `new_param`, `new_mu`, `new_nu`.
    """
    names = ("param", "gradient", "mu", "nu", "step")
    param, mu, nu = adamw(*(inputs[name] for name in names), **attributes)
    return {"new_param": param, "new_mu": mu, "new_nu": nu}
