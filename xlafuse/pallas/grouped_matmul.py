"""Grouped matrix products as Pallas kernels on Mosaic GPU: each group of rows has its own matrix, as experts have.

    c[s] = a[s] b[e]    da[s] = dc[s] b[e]^T    db[e] = sum of a[s]^T dc[s] over the rows s of e    e: the group of s

Rows are sorted by group, and each group is padded with zeros to whole tiles of 128 rows (`Groups`). So a tile has one
group and is stored whole, and padding adds nothing to db. The number of tiles is a bound that holds for all groupings;
kernels leave out the tiles behind the last group, and their rows of c are not written.

The kernels are persistent. One warpgroup copies by TMA, two multiply with `wgmma` (`product_warpgroups.py`). Programs
read a tile's group from a table in memory. There are two kernels:

- `grouped_matmul_kernel` (`launch_products`) computes one product, the sum of several in the same accumulator, or two
  products of the same rows with SwiGLU in the epilogue (Shazeer, arXiv:2002.05202). Then a tile has 128 columns of
  both.
- `grouped_weight_gradient_kernel` (`launch_weight_gradient`) has the rows of a group as its inner dimension. A group
  without rows has no steps, and its db is zero.

Tensor cores read operands from shared memory in either order, so transposed ones are not copied.

Shapes: a [rows, k], b [groups, k, n], c [rows, n]; rows is a multiple of 128; k and n are multiples of 64, or multiples
of 8 below 64. dtypes: bfloat16, float16, one for all. Products accumulate in float32, and the epilogue computes in it.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from xlafuse.pallas.matmul import choose_config
from xlafuse.pallas.mosaic import PROGRAM, check_dtypes, kernel, multiprocessors, tiles_in_shared_memory
from xlafuse.pallas.product_warpgroups import (
    CONSUMERS,
    INNER,
    ROWS,
    own_rows,
    product_scratch,
    run_warpgroups,
    store_tile,
)
from xlafuse.pallas.swiglu import sigmoid


class Groups(NamedTuple):
    """The tiles of the groups, in arrays of int32 that the kernels read.

    counts: rows of each group [groups]. ends: the tile after each group's last one [groups]. of_tile: each tile's group
    [tiles]; the last group for tiles that are not in use.
    """

    counts: jax.Array
    ends: jax.Array
    of_tile: jax.Array


def most_tiles(rows: int, groups: int) -> int:
    """Return the largest number of tiles that `rows` rows in `groups` groups take."""
    return min(rows, (rows + groups * (ROWS - 1)) // ROWS)


def groups_of(counts: jax.Array, rows: int) -> Groups:
    """Return the tiles of groups of `counts` rows, which are `rows` together."""
    ends = jnp.cumsum(pl.cdiv(counts, ROWS), dtype=jnp.int32)
    tile = jnp.arange(most_tiles(rows, len(counts)), dtype=jnp.int32)
    return Groups(counts, ends, jnp.sum(ends[:-1] <= tile[:, None], axis=1, dtype=jnp.int32))


def tiles_of_program(count, compute):
    """Run compute(tile, steps so far) -> steps so far for this program's tiles of `count`, and return the last one."""
    program, programs = lax.axis_index(PROGRAM), lax.axis_size(PROGRAM)
    tiles = lax.div(count - program + programs - 1, programs)
    return lax.fori_loop(0, tiles, lambda at, steps: compute(program + at * programs, steps), jnp.int32(0))


@kernel
def grouped_matmul_kernel(
    ends, of_tile, *references, terms, epilogue, a_ring, b_rings, c_parts, loaded, consumed, config, b_transposed
):
    """Compute the outputs that `epilogue` names from the sum of `terms` products of an a with one or two b's.

    references: a and as many b's as there are rings, for each term; then the outputs.
    """
    outputs = references[-len(epilogue) :]
    arrays = 1 + len(b_rings)  # of a term
    operands = [references[term * arrays : (term + 1) * arrays] for term in range(terms)]
    steps = pl.cdiv(operands[0][0].shape[1], INNER)  # of a term
    grid = ends[ends.shape[0] - 1], pl.cdiv(outputs[0].shape[1], config.columns)

    def corner(tile):
        row, column = plgpu.planar_snake(tile, grid, 0, config.group)
        return row, column * config.columns

    def copy_step(tile, step, slot):
        row, column = corner(tile)
        group, rows, columns = of_tile[row], pl.ds(row * ROWS, ROWS), pl.ds(column, config.columns)

        def copy_term(number):
            inner = pl.ds((step - number * steps) * INNER, INNER)
            a, *bs = operands[number]
            plgpu.copy_gmem_to_smem(a.at[rows, inner], a_ring.at[slot], loaded.at[slot])
            for b, ring in zip(bs, b_rings, strict=True):
                b_tile = b.at[group, columns, inner] if b_transposed else b.at[group, inner, columns]
                plgpu.copy_gmem_to_smem(b_tile, ring.at[slot], loaded.at[slot])

        for number in range(terms):
            here = lax.div(step, steps) == number if terms > 1 else True
            pl.when(here)(lambda number=number: copy_term(number))

    def operands_of(slot):
        a_tile, b_tiles = a_ring.at[slot, own_rows()], [ring.at[slot] for ring in b_rings]
        return [(a_tile, tile.transpose((1, 0)) if b_transposed else tile) for tile in b_tiles]

    def finish(tile, *sums):
        def value_of(number, part):
            if epilogue[number] == "act":
                gate, up = (value[:, part] for value in sums)
                return gate * sigmoid(gate) * up
            return sums[1 if epilogue[number] == "up" else 0][:, part]

        row, column = corner(tile)
        store_tile(outputs, value_of, config.columns, row * ROWS, column, c_parts)

    run_warpgroups(
        lambda compute: tiles_of_program(grid[0] * grid[1], compute), lambda tile: terms * steps, copy_step,
        operands_of, finish, columns=config.columns, ring=config.steps, loaded=loaded, consumed=consumed,
    )


@kernel
def grouped_weight_gradient_kernel(
    counts, ends, a, dc, db, *, a_ring, dc_ring, c_parts, loaded, consumed, config
):
    """Compute db[e] = a^T dc over the rows of each group e."""
    groups, m, n = db.shape
    grid = pl.cdiv(m, ROWS), pl.cdiv(n, config.columns)
    tiles = grid[0] * grid[1]  # of a group

    def place(tile):
        """Return (group, row, column)."""
        row, column = plgpu.planar_snake(lax.rem(tile, tiles), grid, 0, config.group)
        return lax.div(tile, tiles), row * ROWS, column * config.columns

    def steps_of(tile):
        return pl.cdiv(counts[lax.div(tile, tiles)], INNER)

    def copy_step(tile, step, slot):
        group, row, column = place(tile)
        first_row = (ends[group] - pl.cdiv(counts[group], ROWS)) * ROWS
        inner = pl.ds(first_row + step * INNER, INNER)
        plgpu.copy_gmem_to_smem(a.at[inner, pl.ds(row, ROWS)], a_ring.at[slot], loaded.at[slot])
        plgpu.copy_gmem_to_smem(dc.at[inner, pl.ds(column, config.columns)], dc_ring.at[slot], loaded.at[slot])

    def operands_of(slot):
        return [(a_ring.at[slot, :, own_rows()].transpose((1, 0)), dc_ring.at[slot])]

    def finish(tile, value):
        group, row, column = place(tile)
        store_tile([db.at[group]], lambda number, part: value[:, part], config.columns, row, column, c_parts)

    run_warpgroups(
        lambda compute: tiles_of_program(groups * tiles, compute), steps_of, copy_step, operands_of, finish,
        columns=config.columns, ring=config.steps, loaded=loaded, consumed=consumed,
    )


def launch_products(
    terms: Sequence[tuple[jax.Array, ...]], groups: Groups, rows: int, *, epilogue: tuple[str, ...],
    computes: Sequence[Mapping[str, Any]], b_transposed: bool = False,
) -> tuple[jax.Array, ...]:
    """Return the outputs that `epilogue` names. rows: those that are no padding; FLOPs and bytes count only them.

    terms: a [rows of whole tiles, k] and one or two b [groups, k, n], or [groups, n, k] if b_transposed.
    """
    a, *bs = terms[0]
    check_dtypes(*(array for term in terms for array in term))
    k, n = a.shape[1], bs[0].shape[1 if b_transposed else 2]
    config = choose_config(len(a), n, a.dtype.itemsize, accumulators=len(bs))
    b_tile = (config.columns, INNER) if b_transposed else (INNER, config.columns)
    elements = len(terms) * (rows * k + len(bs) * bs[0].size) + len(epilogue) * rows * n
    return grouped_matmul_kernel(
        groups.ends, groups.of_tile, *(array for term in terms for array in term),
        results=(jax.ShapeDtypeStruct((len(a), n), a.dtype),) * len(epilogue),
        programs=min(multiprocessors(), len(a) // ROWS * pl.cdiv(n, config.columns)), warpgroups=CONSUMERS + 1,
        scratch={
            "a_ring": tiles_in_shared_memory((config.steps, ROWS, INNER), a.dtype),
            "b_rings": [tiles_in_shared_memory((config.steps, *b_tile), a.dtype)] * len(bs),
            **product_scratch(config.steps, a.dtype, copies=1 + len(bs)),
        },
        computes=computes,
        cost=pl.CostEstimate(
            flops=2 * rows * k * n * len(bs) * len(terms), bytes_accessed=elements * a.dtype.itemsize,
            transcendentals=2 * rows * n if "act" in epilogue else 0,
        ),
        terms=len(terms), epilogue=epilogue, config=config, b_transposed=b_transposed,
    )


def launch_weight_gradient(
    a: jax.Array, dc: jax.Array, groups: Groups, rows: int, *, computes: Sequence[Mapping[str, Any]]
) -> jax.Array:
    """Return db [groups, m, n] for a [rows of whole tiles, m] and dc [rows of whole tiles, n]."""
    check_dtypes(a, dc)
    (m, n), count = (a.shape[1], dc.shape[1]), len(groups.ends)
    config = choose_config(count * pl.cdiv(m, ROWS) * ROWS, n, a.dtype.itemsize)
    elements = rows * (m + n) + count * m * n
    return grouped_weight_gradient_kernel(
        groups.counts, groups.ends, a, dc, results=jax.ShapeDtypeStruct((count, m, n), a.dtype),
        programs=min(multiprocessors(), count * pl.cdiv(m, ROWS) * pl.cdiv(n, config.columns)),
        warpgroups=CONSUMERS + 1,
        scratch={
            "a_ring": tiles_in_shared_memory((config.steps, INNER, ROWS), a.dtype),
            "dc_ring": tiles_in_shared_memory((config.steps, INNER, config.columns), a.dtype),
            **product_scratch(config.steps, a.dtype, copies=2),
        },
        computes=computes,
        cost=pl.CostEstimate(
            flops=2 * rows * m * n, bytes_accessed=elements * a.dtype.itemsize, transcendentals=0
        ),
        config=config,
    )
