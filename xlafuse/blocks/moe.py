"""A mixture of SwiGLU experts: a router sends each token to the top_k experts with the highest scores (Mixtral).

y = sum over the chosen experts e of w_e ((silu(x w_gate[e]) * (x w_up[e])) w_down[e]). w is the softmax of the chosen
logits, equal to the full softmax's probabilities renormalised over the chosen experts (arXiv:2401.04088). No token is
dropped.

The load-balancing loss is experts * sum over e of fraction_e mean_e (arXiv:2101.03961). fraction_e is the share of
choices that fall on e, and mean_e the mean of its probabilities.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx


class MoE(nnx.Module):
    """The layer with its weights.

    `router` [experts, width], `w_gate`, `w_up` [experts, width, hidden], `w_down` [experts, hidden, width].
    """

    def __init__(
        self, router: jax.Array, w_gate: jax.Array, w_up: jax.Array, w_down: jax.Array, *, top_k: int
    ) -> None:
        self.router = nnx.Param(router)
        self.w_gate = nnx.Param(w_gate)
        self.w_up = nnx.Param(w_up)
        self.w_down = nnx.Param(w_down)
        self.top_k = top_k

    def route(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return (experts [tokens, top_k], their weights [tokens, top_k], balance_loss), computed in float32."""
        experts = self.router.shape[0]
        with jax.named_scope("router"):
            # Products in x's dtype, accumulated in float32.
            logits = jnp.einsum("tw,ew->te", x, self.router[...], preferred_element_type=jnp.float32)
        with jax.named_scope("topk"):
            chosen_logits, chosen = jax.lax.top_k(logits, self.top_k)  # of equal logits the lowest index first
            weights = jax.nn.softmax(chosen_logits, axis=-1)
        with jax.named_scope("balance"):
            probabilities = jax.nn.softmax(logits, axis=-1)
            fraction = jnp.bincount(chosen.ravel(), length=experts) / chosen.size
            return chosen, weights, experts * jnp.sum(fraction * jnp.mean(probabilities, axis=0))

    def __call__(
        self, x: jax.Array, ragged_dot: Callable[..., jax.Array] = jax.lax.ragged_dot
    ) -> tuple[jax.Array, jax.Array]:
        """Return (y [tokens, width], balance_loss []) for `x` [tokens, width]; only the chosen experts compute.

        `ragged_dot` multiplies each expert's group of rows by its weight.
        """
        chosen, weights, balance_loss = self.route(x)
        with jax.named_scope("dispatch"):
            order = jnp.argsort(chosen.ravel(), stable=True)  # slots by expert, then by token
            rows = x[order // self.top_k]
            sizes = jnp.bincount(chosen.ravel(), length=self.router.shape[0])
        with jax.named_scope("gate"):
            gate = ragged_dot(rows, self.w_gate[...], sizes)
        with jax.named_scope("up"):
            up = ragged_dot(rows, self.w_up[...], sizes)
        with jax.named_scope("act"):
            activated = gate * jax.nn.sigmoid(gate) * up
        with jax.named_scope("down"):
            out = ragged_dot(activated, self.w_down[...], sizes)
        with jax.named_scope("combine"):
            out = out[jnp.argsort(order)].reshape(*chosen.shape, -1)
            y = jnp.sum(weights[:, :, None] * out.astype(jnp.float32), axis=1).astype(x.dtype)
        return y, balance_loss

    def run_every_expert(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the same, with every expert on every token; experts that a token did not choose have weight zero."""
        chosen, weights, balance_loss = self.route(x)
        with jax.named_scope("dispatch"):
            token = jnp.arange(x.shape[0])[:, None]
            weights = jnp.zeros((x.shape[0], self.router.shape[0]), weights.dtype).at[token, chosen].set(weights)
        with jax.named_scope("gate"):
            gate = jnp.einsum("tw,ewh->eth", x, self.w_gate[...])
        with jax.named_scope("up"):
            up = jnp.einsum("tw,ewh->eth", x, self.w_up[...])
        with jax.named_scope("act"):
            activated = gate * jax.nn.sigmoid(gate) * up
        with jax.named_scope("down"):
            out = jnp.einsum("eth,ehw->etw", activated, self.w_down[...])
        with jax.named_scope("combine"):
            y = jnp.sum(weights.T[:, :, None] * out.astype(jnp.float32), axis=0).astype(x.dtype)
        return y, balance_loss


def _layer(inputs: dict[str, jax.Array], top_k: int) -> MoE:
    return MoE(*(inputs[name] for name in ("router", "w_gate", "w_up", "w_down")), top_k=top_k)


def apply(
    inputs: dict[str, jax.Array], *, top_k: int, ragged_dot: Callable[..., jax.Array] = jax.lax.ragged_dot
) -> dict[str, jax.Array]:
    """Return the mixture; only the chosen experts compute.

    `x` [tokens, width], `router` [experts, width], `w_gate`, `w_up` [experts, width, hidden], `w_down` [experts,
    hidden, width] -> `y` [tokens, width] in x's dtype, `balance_loss` [] in float32. Routing and the weighted sum are
    float32; the experts' products accumulate in float32 on a GPU and are stored in x's dtype. ragged_dot: a function
    with the arguments of jax.lax's.
    """
    y, balance_loss = _layer(inputs, top_k)(inputs["x"], ragged_dot)
    return {"y": y, "balance_loss": balance_loss}


def apply_dense(inputs: dict[str, jax.Array], *, top_k: int) -> dict[str, jax.Array]:
    """Return the same with every expert on every token: experts / top_k times the products, and no sort."""
    y, balance_loss = _layer(inputs, top_k).run_every_expert(inputs["x"])
    return {"y": y, "balance_loss": balance_loss}
