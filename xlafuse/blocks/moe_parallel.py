"""A mixture of SwiGLU experts over several GPUs (expert parallel): each has its share of the tokens and of the experts.

A rank routes its tokens, sends each to the ranks of its experts, computes the rows that it receives by its own experts,
and sends the results back. No token is dropped: a rank has memory for every choice of every token.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from xlafuse.blocks.moe import MoE
from xlafuse.parallel.ranks import Ranks

# Takes rows by destination and the (from, to) sizes of all groups; returns the received rows by origin, then unused
# ones, and the position of each origin's first row.
Exchange = Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]


def apply(inputs: dict[str, jax.Array], *, ranks: Ranks, top_k: int) -> dict[str, jax.Array]:
    """Return this rank's rows of y, from its slices of the inputs, inside `jax.shard_map`.

    `x` [tokens, width], `router` [experts of all, width], `w_gate`, `w_up` [experts, width, hidden], `w_down` [experts,
    hidden, width] -> `y` [tokens, width]. A group to another rank is padded to the largest that it could have, a row
    for each choice of each token, because `all_to_all` sends groups of one size.
    """

    def padded(rows: jax.Array, sizes: jax.Array) -> tuple[jax.Array, jax.Array]:
        sent = sizes[ranks.index()]
        begin = (jnp.cumsum(sent) - sent)[:, None]
        groups = rows[jnp.minimum(begin + jnp.arange(len(rows)), len(rows) - 1)]  # [to, row, width]
        return ranks.all_to_all(groups).reshape(-1, rows.shape[1]), jnp.arange(ranks.count) * len(rows)

    def returned(rows: jax.Array, sizes: jax.Array, count: int) -> jax.Array:
        groups = ranks.all_to_all(rows.reshape(ranks.count, count, -1))
        sent = sizes[ranks.index()]
        owner = jnp.searchsorted(jnp.cumsum(sent), jnp.arange(count), side="right")
        return groups[owner, jnp.arange(count) - (jnp.cumsum(sent) - sent)[owner]]

    return _apply(inputs, ranks, top_k, padded, returned)


def apply_ragged(inputs: dict[str, jax.Array], *, ranks: Ranks, top_k: int) -> dict[str, jax.Array]:
    """Return the same. Ranks exchange exactly the rows that the routing asks for; XLA's CPU backend cannot."""

    def compact(rows: jax.Array, sizes: jax.Array) -> tuple[jax.Array, jax.Array]:
        received = sizes[:, ranks.index()]
        return (
            ranks.ragged_all_to_all(rows, sizes, ranks.count * len(rows)), jnp.cumsum(received) - received
        )

    def returned(rows: jax.Array, sizes: jax.Array, count: int) -> jax.Array:
        return ranks.ragged_all_to_all(rows, sizes.T, count)

    return _apply(inputs, ranks, top_k, compact, returned)


def _apply(
    inputs: dict[str, jax.Array], ranks: Ranks, top_k: int, exchange: Exchange,
    send_back: Callable[[jax.Array, jax.Array, int], jax.Array],
) -> dict[str, jax.Array]:
    x = inputs["x"]
    weights = [inputs[name] for name in ("w_gate", "w_up", "w_down")]
    experts, own = len(inputs["router"]), len(weights[0])
    chosen, chosen_weights, _ = MoE(inputs["router"], *weights, top_k=top_k).route(x)
    with jax.named_scope("dispatch"):
        order = jnp.argsort(chosen.ravel(), stable=True)  # slots by expert, so by rank, then by token
        counts = jnp.bincount(chosen.ravel(), length=experts)
        every_count = ranks.all_gather(counts).reshape(ranks.count, ranks.count, own)  # [from, to, expert]
        sizes = every_count.sum(-1)
        rows, begin = exchange(x[order // top_k], sizes)
    with jax.named_scope("group"):
        arrived = every_count[:, ranks.index()]  # [from, expert]
        expert = _expert_of_rows(arrived, begin, len(rows))
        by_expert = jnp.argsort(expert, stable=True)
        grouped, group_sizes = rows[by_expert], arrived.sum(0)
    with jax.named_scope("gate"):
        gate = jax.lax.ragged_dot(grouped, weights[0], group_sizes)
    with jax.named_scope("up"):
        up = jax.lax.ragged_dot(grouped, weights[1], group_sizes)
    with jax.named_scope("act"):
        activated = gate * jax.nn.sigmoid(gate) * up
    with jax.named_scope("down"):
        out = jax.lax.ragged_dot(activated, weights[2], group_sizes)
    with jax.named_scope("combine"):
        back = send_back(out[jnp.argsort(by_expert)], sizes, chosen.size)
        back = back[jnp.argsort(order)].reshape(*chosen.shape, -1)
        y = jnp.sum(chosen_weights[:, :, None] * back.astype(jnp.float32), axis=1).astype(x.dtype)
    return {"y": y}


def _expert_of_rows(arrived: jax.Array, begin: jax.Array, rows: int) -> jax.Array:
    """Return the expert of each received row, by its number on this rank; the number of experts for an unused row.

    arrived [from, expert]: how many rows came. begin [from]: the position of each origin's first row.
    """
    position = jnp.arange(rows)
    origin = jnp.searchsorted(begin, position, side="right") - 1
    ends = jnp.cumsum(arrived, axis=1)
    inside = (position - begin[origin])[:, None]
    return jnp.sum(inside >= ends[origin], axis=1)
