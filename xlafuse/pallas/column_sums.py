"""Sums over the rows of a matrix as a Pallas kernel on Mosaic GPU: the gradient of a bias.

    sums_j = sum_i x_ij

Each program sums its share of the rows for 256 columns, two a thread, while TMA copies its next tiles. XLA adds the
shares in a second, small kernel. There are no atomics, so results repeat bit for bit.

Shapes: x [rows, columns], sums [columns]; columns are a multiple of 8. dtypes: bfloat16 or float16; float32 inside.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from xlafuse.pallas.mosaic import PROGRAM, kernel, multiprocessors, operation, rings, store, stream

ROWS, COLUMNS = 16, 256  # of a tile; TMA copies at most 256 elements of an axis
STEPS = 4  # tiles of a program in shared memory
RESIDENT = 6  # programs that share a multiprocessor's 227 KiB of shared memory
DBIAS = operation("reduce_sum", "bias", "partial", backward=True)


@dataclass(frozen=True)
class Shares:
    """The tiles of a launch: for each of `blocks` blocks of columns, each of `count` programs takes `steps` tiles."""

    count: int
    blocks: int
    steps: int

    @property
    def partial(self) -> jax.ShapeDtypeStruct:
        """The sums of each share: float32, with columns of whole blocks (`mosaic.store`)."""
        return jax.ShapeDtypeStruct((self.count, self.blocks * COLUMNS), jnp.float32)

    def position(self) -> tuple[jax.Array, jax.Array]:
        """Return the share and the block of columns of this program, in a kernel."""
        program = lax.axis_index(PROGRAM)
        return lax.div(program, self.blocks), lax.rem(program, self.blocks)

    def tile(self, step: Any) -> tuple[Any, Any]:
        """Return a tile of this program; beyond the last rows it is zero, and not stored."""
        share, block = self.position()
        return pl.ds((share + step * self.count) * ROWS, ROWS), pl.ds(block * COLUMNS, COLUMNS)

    def store(self, total: jax.Array, buffer: Any, partial: Any) -> None:
        """Store this program's sums [COLUMNS] through shared memory, as a part of `partial`."""
        share, block = self.position()
        buffer[...] = total
        plgpu.commit_smem()
        store(buffer, partial, (share, pl.ds(block * COLUMNS, COLUMNS)))
        plgpu.wait_smem_to_gmem(0)


def choose_shares(rows: int, columns: int, resident: int) -> Shares:
    """Return as many shares of the rows as there are programs for, `resident` on each multiprocessor."""
    blocks, tiles = pl.cdiv(columns, COLUMNS), pl.cdiv(rows, ROWS)
    count = max(1, min(tiles, resident * multiprocessors() // blocks))
    return Shares(count, blocks, pl.cdiv(tiles, count))


@kernel
def column_sums_kernel(x, partial, *, buffer, shares, **rings):
    def add_tile(_, total, tile):
        for row in range(ROWS):
            total += tile[row].astype(jnp.float32)
        return total

    zero = jnp.zeros(COLUMNS, jnp.float32)
    total = stream(add_tile, [x], [], tile_of=shares.tile, tiles=shares.steps, carry=zero, **rings)
    shares.store(total, buffer, partial)


def column_sums(x: jax.Array) -> jax.Array:
    """Return the sums over the rows of x, in its dtype."""
    rows, columns = x.shape
    shares = choose_shares(rows, columns, RESIDENT)
    cost = pl.CostEstimate(
        flops=rows * columns, bytes_accessed=rows * columns * x.dtype.itemsize + 4 * shares.partial.size,
        transcendentals=0,
    )
    partial = column_sums_kernel(
        x, results=shares.partial, programs=shares.count * shares.blocks,
        scratch=rings(STEPS, (ROWS, COLUMNS), x.dtype, inputs=1) | {"buffer": plgpu.SMEM((COLUMNS,), jnp.float32)},
        computes=[DBIAS], cost=cost, shares=shares,
    )
    return add_shares(partial, columns, x.dtype)


def add_shares(partial: jax.Array, columns: int, dtype: Any) -> jax.Array:
    """Return the sums [columns] over the shares."""
    with jax.named_scope("bias"):
        return partial[:, :columns].sum(0).astype(dtype)
