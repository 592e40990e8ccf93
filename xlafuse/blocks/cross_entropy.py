"""Mean cross-entropy with label smoothing (arXiv:1512.00567), ignored labels and z-loss (arXiv:2204.02311)."""

import jax
import jax.numpy as jnp

IGNORED = -100


def apply(inputs: dict[str, jax.Array], *, smoothing: float, z_loss: float) -> dict[str, jax.Array]:
    """Return the mean loss: `logits` [tokens, classes], `labels` [tokens] int32 -> `loss` [], computed in float32.

    The mean is over tokens whose label is not IGNORED, and 0 if there are none. With lse = logsumexp(logits), a token's
    loss is (1 - smoothing) (lse - logit[label]) + smoothing (lse - mean(logits)) + z_loss lse^2.
    """
    with jax.named_scope("logsumexp"):
        logits = inputs["logits"].astype(jnp.float32)
        # The maximum only guards against overflow and cancels in the result, so no gradient flows through it.
        largest = jax.lax.stop_gradient(jnp.max(logits, axis=-1))
        lse = largest + jnp.log(jnp.sum(jnp.exp(logits - largest[:, None]), axis=-1))
    with jax.named_scope("target"):
        label = jnp.where(inputs["labels"] != IGNORED, inputs["labels"], 0)
        # A comparison, because the gradient of a lookup is a scatter into an array of zeros.
        is_label = jnp.arange(logits.shape[-1]) == label[:, None]
        chosen = jnp.sum(jnp.where(is_label, logits, 0.0), axis=-1)
    with jax.named_scope("smoothing"):
        mean = jnp.mean(logits, axis=-1)
    return {"loss": mean_loss(lse, chosen, mean, inputs["labels"], smoothing, z_loss)}


def mean_loss(
    lse: jax.Array, chosen: jax.Array, mean: jax.Array, labels: jax.Array, smoothing: float, z_loss: float
) -> jax.Array:
    """Return the loss from each token's logsumexp, its label's logit and its mean logit, all [tokens] float32."""
    with jax.named_scope("target"):
        target = lse - chosen
    with jax.named_scope("smoothing"):
        losses = (1 - smoothing) * target + smoothing * (lse - mean)
    with jax.named_scope("z_loss"):
        losses = losses + z_loss * lse * lse
    with jax.named_scope("mean"):
        counted = labels != IGNORED
        return jnp.sum(jnp.where(counted, losses, 0.0)) / jnp.maximum(jnp.sum(counted), 1)
