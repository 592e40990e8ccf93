"""Exchanges between the GPUs of one host inside `jax.shard_map`, and local stand-ins with results of the same shapes.

A program whose exchanges are stand-ins computes wrong values. It is timed to know the cost of communication.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

AXIS = "ranks"  # of the mesh


@dataclass(frozen=True)
class Ranks:
    """The GPUs that compute a block together. communicate: False replaces each exchange by its stand-in."""

    count: int
    communicate: bool = True

    def index(self) -> jax.Array:
        return jax.lax.axis_index(AXIS)

    def all_gather(self, x: jax.Array) -> jax.Array:
        """Return every rank's rows, in order of rank."""
        if self.communicate:
            return jax.lax.all_gather(x, AXIS, axis=0, tiled=True)
        return jnp.tile(x, (self.count, *[1] * (x.ndim - 1)))

    def reduce_scatter(self, x: jax.Array) -> jax.Array:
        """Return this rank's share of the rows, summed over the ranks."""
        if self.communicate:
            return jax.lax.psum_scatter(x, AXIS, scatter_dimension=0, tiled=True)
        return x.reshape(self.count, -1, *x.shape[1:])[0]

    def all_reduce(self, x: jax.Array) -> jax.Array:
        return jax.lax.psum(x, AXIS) if self.communicate else x

    def all_to_all(self, x: jax.Array) -> jax.Array:
        """Send x[r] to rank r, and return at [r] the array that came from rank r."""
        return jax.lax.all_to_all(x, AXIS, split_axis=0, concat_axis=0, tiled=False) if self.communicate else x

    def ragged_all_to_all(self, rows: jax.Array, sizes: jax.Array, capacity: int) -> jax.Array:
        """Send each rank its group of `rows`, and return `capacity` rows: the received ones by rank, then zeros.

        sizes [from, to]: the rows of every group, the same on each rank. `rows` holds this rank's groups in order.
        """
        buffer = jnp.zeros((capacity, *rows.shape[1:]), rows.dtype)
        if not self.communicate:
            return jax.lax.dynamic_update_slice_in_dim(buffer, rows, 0, 0) if len(rows) <= capacity else rows[:capacity]
        sent, received = sizes[self.index()], sizes[:, self.index()]
        begin = jnp.cumsum(sent) - sent
        at_receiver = (jnp.cumsum(sizes, axis=0) - sizes)[self.index()]
        return jax.lax.ragged_all_to_all(rows, buffer, begin, sent, at_receiver, received, axis_name=AXIS)
