"""The last projection and its loss, with all logits in memory or in chunks of classes."""

import jax
import jax.numpy as jnp

from xlafuse.blocks import cross_entropy
from xlafuse.blocks.cross_entropy import mean_loss

CLASSES = 8192  # at most in a chunk; for 8192 tokens these are 268 MB of float32 logits


def apply(inputs: dict[str, jax.Array], *, smoothing: float, z_loss: float) -> dict[str, jax.Array]:
    """Return the loss of the block `cross_entropy` for the logits h w^T, which are rounded to the inputs' dtype.

    `h` [tokens, width], `w` [classes, width], `labels` [tokens] int32 -> `loss` [] in float32.
    """
    with jax.named_scope("product"):
        logits = inputs["h"] @ inputs["w"].T
    return cross_entropy.apply({"logits": logits, "labels": inputs["labels"]}, smoothing=smoothing, z_loss=z_loss)


def apply_in_chunks(
    inputs: dict[str, jax.Array], *, smoothing: float, z_loss: float, largest: int = CLASSES
) -> dict[str, jax.Array]:
    """Return the same from the logits of `largest` classes at a time; backward computes these logits again.

    Chunks divide the classes, so no row of w's gradient is a sum over chunks. The gradient of h is such a sum, in
    float32, the dtype of h outside the loop.
    """
    w, labels = inputs["w"], inputs["labels"]
    classes, width = w.shape
    chunks = -(-classes // largest)
    chunk = classes // chunks
    wide_h = inputs["h"].astype(jnp.float32)

    def statistics(wide_h: jax.Array, rows: jax.Array, first: jax.Array | int) -> tuple[jax.Array, ...]:
        """Return each token's logsumexp, sum, and label's logit or 0, over the classes from `first` on."""
        with jax.named_scope("product"):
            logits = (wide_h.astype(w.dtype) @ rows.T).astype(jnp.float32)
        with jax.named_scope("logsumexp"):
            lse = jax.nn.logsumexp(logits, axis=-1)
        with jax.named_scope("target"):
            label = labels - first
            here = (label >= 0) & (label < rows.shape[0])
            found = jnp.take_along_axis(logits, jnp.where(here, label, 0)[:, None], axis=-1)[:, 0]
            chosen = jnp.where(here, found, 0.0)
        with jax.named_scope("smoothing"):
            return lse, jnp.sum(logits, axis=-1), chosen

    # XLA does not merge computations of different iterations, so the recomputation needs no barrier.
    again = jax.checkpoint(statistics, prevent_cse=False)
    whole = chunks * chunk
    rows, firsts = w[:whole].reshape(chunks, chunk, width), chunk * jnp.arange(chunks, dtype=labels.dtype)
    parts = jax.lax.map(lambda given: again(wide_h, *given), (rows, firsts))
    if whole < classes:
        rest = jax.checkpoint(statistics)(wide_h, w[whole:], whole)
        parts = tuple(jnp.concatenate([part, last[None]]) for part, last in zip(parts, rest, strict=True))
    lse, total, chosen = parts
    with jax.named_scope("logsumexp"):
        lse = jax.nn.logsumexp(lse, axis=0)
    with jax.named_scope("target"):
        chosen = jnp.sum(chosen, axis=0)
    with jax.named_scope("smoothing"):
        mean = jnp.sum(total, axis=0) / classes
    return {"loss": mean_loss(lse, chosen, mean, labels, smoothing, z_loss)}
