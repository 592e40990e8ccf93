"""A SwiGLU MLP over several GPUs (tensor parallel): the rows of x are split over them, and so is the hidden axis.

    y = (silu(x w_gate) * (x w_up)) w_down

A rank gathers all rows, computes its share of the hidden axis, and sums its share of the rows over the ranks.
"""

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from xlafuse.parallel.ranks import AXIS, Ranks


def apply(inputs: dict[str, jax.Array], *, ranks: Ranks) -> dict[str, jax.Array]:
    """Return this rank's rows of y, from its slices of the inputs, inside `jax.shard_map`.

    `x` [tokens, width], `w_gate`, `w_up` [width, hidden], `w_down` [hidden, width] -> `y` [tokens, width].
    """
    with jax.named_scope("gather"):
        x = ranks.all_gather(inputs["x"])
    y = _down(_activated(x, inputs), inputs)
    with jax.named_scope("scatter"):
        return {"y": ranks.reduce_scatter(y)}


def apply_whole(inputs: dict[str, jax.Array], *, mesh: Mesh) -> dict[str, jax.Array]:
    """Return y from whole arrays; XLA's partitioner adds the exchanges that their shardings on the mesh ask for.

    Without a sharding of the hidden values, it would gather the weights and split the work by tokens. The arrays have a
    leading axis of size 1: without it, XLA of jax 0.11.2 refuses its own code when it splits a product of matrices to
    overlap with an exchange.
    """

    def placed(values: jax.Array, *axes: str | None) -> jax.Array:
        return jax.lax.with_sharding_constraint(values, NamedSharding(mesh, PartitionSpec(None, *axes)))

    x = placed(inputs["x"][None], AXIS, None)
    activated = placed(_activated(x, inputs), None, AXIS)
    return {"y": placed(_down(activated, inputs), AXIS, None)[0]}


def _activated(x: jax.Array, weights: dict[str, jax.Array]) -> jax.Array:
    with jax.named_scope("gate"):
        gate = x @ weights["w_gate"]
    with jax.named_scope("up"):
        up = x @ weights["w_up"]
    with jax.named_scope("act"):
        return gate * jax.nn.sigmoid(gate) * up


def _down(activated: jax.Array, weights: dict[str, jax.Array]) -> jax.Array:
    with jax.named_scope("down"):
        return activated @ weights["w_down"]
