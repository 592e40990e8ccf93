"""Grouped matrix products as Pallas kernels on Mosaic GPU: each group of rows has its own matrix, as experts have.

    c[s] = a[s] b[e]    da[s] = dc[s] b[e]^T    db[e] = sum of a[s]^T dc[s] over the rows s of e    e: the group of s

Rows are sorted by group, and each group is padded with zeros to whole tiles of 128 rows (`Groups`). So a tile has one
group and is stored whole, and padding adds nothing to db. The number of tiles is a bound that holds for all groupings;
kernels leave out the tiles behind the last group, and their rows of c are not written.

The persistent kernels have the roles of `matmul.py`: one warpgroup copies by TMA, two multiply. Programs read a tile's
group from a table in memory. There are two kernels:

- `grouped_matmul_kernel` (`launch_products`) computes one product, the sum of several in the same accumulator, or two
  products of the same rows with SwiGLU in the epilogue (Shazeer, arXiv:2002.05202). Then a tile has 128 columns of
  both.
- `grouped_weight_gradient_kernel` (`launch_weight_gradient`) has the rows of a group as its inner dimension. A group
  without rows has no steps, and its db is zero.

Tensor cores read operands from shared memory in either order, so transposed ones are not copied.

Shapes: a [rows, k], b [groups, k, n], c [rows, n]; rows is a multiple of 128; k and n are multiples of 64, or multiples
of 8 below 64. dtypes: bfloat16, float16, one for all. Products accumulate in float32, and the epilogue computes in it.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from xlafuse.pallas.matmul import CONSUMERS, INNER, OWN_ROWS, ROWS, STORED, STORES, Config, choose_config
from xlafuse.pallas.mosaic import (
    PROGRAM,
    WARPGROUP,
    check_dtypes,
    kernel,
    multiprocessors,
    tiles_in_shared_memory,
)
from xlafuse.pallas.swiglu import sigmoid


class Groups(NamedTuple):
    """The tiles of the groups, in arrays of int32 that the kernels read.

    ends: the tile after each group's last one [groups]. of_tile: each tile's group [tiles]; the last group for tiles
    that are not in use.
    """

    ends: jax.Array
    of_tile: jax.Array


def most_tiles(rows: int, groups: int) -> int:
    """Return the largest number of tiles that `rows` rows in `groups` groups take."""
    return min(rows, (rows + groups * (ROWS - 1)) // ROWS)


def groups_of(counts: jax.Array, rows: int) -> Groups:
    """Return the tiles of groups of `counts` rows, which are `rows` together."""
    ends = jnp.cumsum(pl.cdiv(counts.astype(jnp.int32), ROWS))
    tile = jnp.arange(most_tiles(rows, len(counts)), dtype=jnp.int32)
    return Groups(ends, jnp.sum(ends[:-1] <= tile[:, None], axis=1, dtype=jnp.int32))


def each_tile(count: Any, compute: Callable[[Any, Any], Any]) -> Any:
    """Run compute(tile, step) for this program's tiles of `count`; it returns the number of steps so far."""
    program, programs = lax.axis_index(PROGRAM), lax.axis_size(PROGRAM)
    tiles = lax.div(count - program + programs - 1, programs)
    return lax.fori_loop(0, tiles, lambda at, step: compute(program + at * programs, step), jnp.int32(0))


def run_warpgroups(
    count: Any, steps_of: Callable[[Any], Any], copy_step: Callable[[Any, Any, Any], None],
    operands_of: Callable[[Any], Sequence[Any]], finish: Callable[[Any, Sequence[Any]], None], *,
    columns: int, loaded: Any, consumed: Any, config: Config,
) -> None:
    """Compute `count` tiles of a product: one warpgroup copies the operands' steps into rings, two multiply them.

    steps_of(tile): the number of steps, which may be zero. copy_step(tile, step, slot) starts the copies of a step.
    operands_of(slot): pairs of operands in shared memory, one for each accumulator of `columns` columns.
    finish(tile, sums): stores a consumer's part of the tile.
    """
    warpgroup = lax.axis_index(WARPGROUP)

    @pl.when(warpgroup == CONSUMERS)
    def copy_operands():
        plgpu.set_max_registers(40, action="decrease")

        def copy_tile(tile, first):
            steps = steps_of(tile)

            @pl.loop(0, steps)
            def copy(at):
                slot = lax.rem(first + at, config.steps)
                pl.when(first + at >= config.steps)(lambda: plgpu.barrier_wait(consumed.at[slot]))
                copy_step(tile, at, slot)

            return first + steps

        total = each_tile(count, copy_tile)

        @pl.loop(lax.max(total - config.steps, 0), total)
        def wait_for_consumers(step):
            plgpu.barrier_wait(consumed.at[lax.rem(step, config.steps)])

    @pl.when(warpgroup < CONSUMERS)
    def multiply():
        plgpu.set_max_registers(232, action="increase")

        def multiply_steps(first, steps, *accumulators):
            def multiply_step(at, _):
                slot = lax.rem(first + at, config.steps)
                plgpu.barrier_wait(loaded.at[slot])
                for accumulator, operands in zip(accumulators, operands_of(slot), strict=True):
                    plgpu.wgmma(accumulator, *operands)
                plgpu.wgmma_wait(len(accumulators))  # the step before has been read; this one runs on

                @pl.when(at > 0)
                def release_step():
                    plgpu.barrier_arrive(consumed.at[lax.rem(first + at - 1, config.steps)])

            lax.fori_loop(0, steps, multiply_step, None)
            plgpu.wgmma_wait(0)

            @pl.when(steps > 0)
            def release_last_step():
                plgpu.barrier_arrive(consumed.at[lax.rem(first + steps - 1, config.steps)])

            return [accumulator[...] for accumulator in accumulators]

        def multiply_tile(tile, first):
            steps = steps_of(tile)
            accumulators = [plgpu.ACC((OWN_ROWS, columns), jnp.float32)] * len(operands_of(0))
            finish(tile, pl.run_scoped(lambda *refs: multiply_steps(first, steps, *refs), *accumulators))
            return first + steps

        each_tile(count, multiply_tile)
        plgpu.wait_smem_to_gmem(0)


def store_parts(
    outputs: Sequence[Any], results_of: Callable[[Any], Sequence[Any]], columns: int, index: tuple[Any, ...], row: Any,
    column: Any, c_parts: Any,
) -> None:
    """Store a consumer's part of a tile through shared memory, 64 columns at a time.

    results_of(part): the outputs' values in a slice of columns. index: the tile's matrix in outputs of several.
    """
    warpgroup = lax.axis_index(WARPGROUP)
    stores = [(part, number) for part in range(0, columns, STORED) for number in range(len(outputs))]
    results: Sequence[Any] = ()
    for at, (part, number) in enumerate(stores):
        if number == 0:
            results = results_of(slice(part, part + STORED))
        buffer = c_parts.at[warpgroup, at % STORES]
        plgpu.wait_smem_to_gmem(STORES - 1 if at else 0, wait_read_only=True)
        buffer[...] = results[number].astype(buffer.dtype)
        plgpu.commit_smem()
        target = *index, pl.ds(row + warpgroup * OWN_ROWS, OWN_ROWS), pl.ds(column + part, STORED)
        plgpu.copy_smem_to_gmem(buffer, outputs[number].at[target])


@kernel
def grouped_matmul_kernel(
    ends, of_tile, *references, terms, epilogue, a_ring, b_rings, c_parts, loaded, consumed, config,
    b_transposed,
):
    """Compute the outputs that `epilogue` names from the sum of products of `terms` pairs of a and b's.

    references: the terms, each of a and as many b's as there are rings, then the outputs.
    """
    outputs = references[-len(epilogue) :]
    width = 1 + len(b_rings)
    operands = [references[term * width : (term + 1) * width] for term in range(terms)]
    steps = pl.cdiv(operands[0][0].shape[1], INNER)  # of a term
    row_tiles = ends[ends.shape[0] - 1]
    column_tiles = pl.cdiv(outputs[0].shape[1], config.columns)
    own = pl.ds(lax.axis_index(WARPGROUP) * OWN_ROWS, OWN_ROWS)

    def corner(tile):
        row, column = plgpu.planar_snake(tile, (row_tiles, column_tiles), 0, config.group)
        return row, column * config.columns

    def copy_step(tile, step, slot):
        row, column = corner(tile)
        group, rows, columns = of_tile[row], pl.ds(row * ROWS, ROWS), pl.ds(column, config.columns)

        def copy_term(a, *bs, inner):
            plgpu.copy_gmem_to_smem(a.at[rows, inner], a_ring.at[slot], loaded.at[slot])
            for b, ring in zip(bs, b_rings, strict=True):
                b_tile = b.at[group, columns, inner] if b_transposed else b.at[group, inner, columns]
                plgpu.copy_gmem_to_smem(b_tile, ring.at[slot], loaded.at[slot])

        if terms == 1:
            copy_term(*operands[0], inner=pl.ds(step * INNER, INNER))
            return
        for number, term in enumerate(operands):
            inner = pl.ds((step - number * steps) * INNER, INNER)
            pl.when(lax.div(step, steps) == number)(lambda term=term, inner=inner: copy_term(*term, inner=inner))

    def operands_of(slot):
        a_tile = a_ring.at[slot, own]
        tiles = [ring.at[slot] for ring in b_rings]
        return [(a_tile, tile.transpose((1, 0)) if b_transposed else tile) for tile in tiles]

    def finish(tile, sums):
        row, column = corner(tile)

        def results_of(part):
            parts = [value[:, part] for value in sums]
            compute = {
                "sum": lambda: parts[0], "gate": lambda: parts[0], "up": lambda: parts[1],
                "act": lambda: parts[0] * sigmoid(parts[0]) * parts[1],
            }
            return [compute[name]() for name in epilogue]

        store_parts(outputs, results_of, config.columns, (), row * ROWS, column, c_parts)

    run_warpgroups(
        row_tiles * column_tiles, lambda tile: terms * steps, copy_step, operands_of, finish,
        columns=config.columns, loaded=loaded, consumed=consumed, config=config,
    )


@kernel
def grouped_weight_gradient_kernel(ends, a, dc, db, *, a_ring, dc_ring, c_parts, loaded, consumed, config):
    """Compute db[e] = a^T dc over the rows of each group e."""
    groups, m, n = db.shape
    grid = pl.cdiv(m, ROWS), pl.cdiv(n, config.columns)
    tiles = grid[0] * grid[1]  # of a group
    own = pl.ds(lax.axis_index(WARPGROUP) * OWN_ROWS, OWN_ROWS)

    def corner(tile):
        row, column = plgpu.planar_snake(lax.rem(tile, tiles), grid, 0, config.group)
        return row * ROWS, column * config.columns

    def first_tile(tile):
        group = lax.div(tile, tiles)
        return jnp.where(group == 0, 0, ends[jnp.maximum(group - 1, 0)])

    def steps_of(tile):
        return (ends[lax.div(tile, tiles)] - first_tile(tile)) * (ROWS // INNER)

    def copy_step(tile, step, slot):
        row, column = corner(tile)
        inner = pl.ds(first_tile(tile) * ROWS + step * INNER, INNER)
        plgpu.copy_gmem_to_smem(a.at[inner, pl.ds(row, ROWS)], a_ring.at[slot], loaded.at[slot])
        plgpu.copy_gmem_to_smem(dc.at[inner, pl.ds(column, config.columns)], dc_ring.at[slot], loaded.at[slot])

    def operands_of(slot):
        return [(a_ring.at[slot, :, own].transpose((1, 0)), dc_ring.at[slot])]

    def finish(tile, sums):
        index = (lax.div(tile, tiles),)
        store_parts([db], lambda part: [sums[0][:, part]], config.columns, index, *corner(tile), c_parts)

    run_warpgroups(
        groups * tiles, steps_of, copy_step, operands_of, finish,
        columns=config.columns, loaded=loaded, consumed=consumed, config=config,
    )


def scratch_of(config: Config, dtype: Any, **rings: Any) -> dict[str, Any]:
    """Return the rings, and the shared memory and barriers that all products have."""
    copies = sum(len(ring) if isinstance(ring, list) else 1 for ring in rings.values())
    return rings | {
        "c_parts": tiles_in_shared_memory((CONSUMERS, STORES, OWN_ROWS, STORED), dtype),
        "loaded": plgpu.Barrier(num_arrivals=copies, num_barriers=config.steps),
        "consumed": plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=config.steps),
    }


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
        *groups, *(array for term in terms for array in term),
        results=(jax.ShapeDtypeStruct((len(a), n), a.dtype),) * len(epilogue),
        programs=min(multiprocessors(), len(a) // ROWS * pl.cdiv(n, config.columns)), warpgroups=CONSUMERS + 1,
        scratch=scratch_of(
            config, a.dtype, a_ring=tiles_in_shared_memory((config.steps, ROWS, INNER), a.dtype),
            b_rings=[tiles_in_shared_memory((config.steps, *b_tile), a.dtype)] * len(bs),
        ),
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
        groups.ends, a, dc, results=jax.ShapeDtypeStruct((count, m, n), a.dtype),
        programs=min(multiprocessors(), count * pl.cdiv(m, ROWS) * pl.cdiv(n, config.columns)),
        warpgroups=CONSUMERS + 1,
        scratch=scratch_of(
            config, a.dtype, a_ring=tiles_in_shared_memory((config.steps, INNER, ROWS), a.dtype),
            dc_ring=tiles_in_shared_memory((config.steps, INNER, config.columns), a.dtype),
        ),
        computes=computes,
        cost=pl.CostEstimate(
            flops=2 * rows * m * n, bytes_accessed=elements * a.dtype.itemsize, transcendentals=0
        ),
        config=config,
    )
