"""The roles of a matrix product's warpgroups on Hopper: one copies tiles of the operands, two multiply and store.

These are the roles of CUTLASS's warp-specialised cooperative kernels. The copying warpgroup fills a ring of steps in
shared memory by TMA. The multiplying ones own 64 of a tile's 128 rows each, and store them through shared memory. The
ring does not drain between tiles: while one is stored, the steps of the next are copied. Barriers tell when a step of
the ring is loaded and when both warpgroups have read it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from xlafuse.pallas.mosaic import WARPGROUP, tiles_in_shared_memory

CONSUMERS = 2  # warpgroups that multiply; one more copies
OWN_ROWS = 64  # of a tile of c, for one consumer: the rows of a `wgmma`
ROWS = CONSUMERS * OWN_ROWS
INNER = 64  # of a step: 128 bytes, the widest swizzle
STORED = 64  # columns of c that a consumer stores at a time
STORES = 2  # stores of a consumer in flight


def product_scratch(steps: int, dtype: Any, *, copies: int) -> dict[str, Any]:
    """Return what all products have beside their rings: parts of c, and barriers for each step of the rings.

    copies: of a step.
    """
    return {
        "c_parts": tiles_in_shared_memory((CONSUMERS, STORES, OWN_ROWS, STORED), dtype),
        "loaded": plgpu.Barrier(num_arrivals=copies, num_barriers=steps),
        "consumed": plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=steps),
    }


def own_rows() -> Any:
    """Return the slice of a tile's rows that a consumer owns, in a kernel."""
    return pl.ds(lax.axis_index(WARPGROUP) * OWN_ROWS, OWN_ROWS)


def run_warpgroups(
    each_tile: Callable[[Callable[[Any, Any], Any]], Any], steps_of: Callable[[Any], Any],
    copy_step: Callable[[Any, Any, Any], None], operands_of: Callable[[Any], Sequence[Any]],
    finish: Callable[..., None], *, columns: int, ring: int, loaded: Any, consumed: Any,
    begin: Callable[[Any], None] = lambda tile: None,
) -> None:
    """Compute a program's tiles, in a kernel.

    each_tile(compute): runs compute(tile, steps so far) -> steps so far for each tile, and returns the last result.
    steps_of(tile): the number of steps along the inner dimension, which may be zero.
    copy_step(tile, step, slot): starts the copies of a step into a slot of the rings, which have `ring` slots.
    operands_of(slot): pairs of operands in shared memory, one for each accumulator of `columns` columns.
    begin(tile): runs before a consumer's first step. finish(tile, *sums): stores a consumer's part of the tile.
    """
    warpgroup = lax.axis_index(WARPGROUP)

    @pl.when(warpgroup == CONSUMERS)
    def copy_operands():
        plgpu.set_max_registers(40, action="decrease")

        def copy_tile(tile, first):
            steps = steps_of(tile)

            @pl.loop(0, steps)
            def copy(at):
                slot = lax.rem(first + at, ring)
                pl.when(first + at >= ring)(lambda: plgpu.barrier_wait(consumed.at[slot]))
                copy_step(tile, at, slot)

            return first + steps

        total = each_tile(copy_tile)

        @pl.loop(lax.max(total - ring, 0), total)
        def wait_for_consumers(step):
            plgpu.barrier_wait(consumed.at[lax.rem(step, ring)])

    @pl.when(warpgroup < CONSUMERS)
    def multiply():
        plgpu.set_max_registers(232, action="increase")

        def multiply_steps(first, steps, *accumulators):
            def multiply_step(at, _):
                slot = lax.rem(first + at, ring)
                plgpu.barrier_wait(loaded.at[slot])
                for accumulator, operands in zip(accumulators, operands_of(slot), strict=True):
                    plgpu.wgmma(accumulator, *operands)
                plgpu.wgmma_wait(len(accumulators))  # the step before has been read; this one runs on

                @pl.when(at > 0)
                def release_step():
                    plgpu.barrier_arrive(consumed.at[lax.rem(first + at - 1, ring)])

            lax.fori_loop(0, steps, multiply_step, None)
            plgpu.wgmma_wait(0)

            @pl.when(steps > 0)
            def release_last_step():
                plgpu.barrier_arrive(consumed.at[lax.rem(first + steps - 1, ring)])

            return [accumulator[...] for accumulator in accumulators]

        def multiply_tile(tile, first):
            steps = steps_of(tile)
            begin(tile)
            accumulators = [plgpu.ACC((OWN_ROWS, columns), jnp.float32)] * len(operands_of(0))
            finish(tile, *pl.run_scoped(lambda *references: multiply_steps(first, steps, *references), *accumulators))
            return first + steps

        each_tile(multiply_tile)
        plgpu.wait_smem_to_gmem(0)


def store_tile(
    outputs: Sequence[Any], value_of: Callable[[int, slice], Any], columns: int, row: Any, column: Any, c_parts: Any
) -> None:
    """Store a consumer's part of a tile, 64 columns at a time; the next part is computed meanwhile.

    outputs: matrices in memory. value_of(number, part): the value of an output in a slice of the tile's columns.
    row, column: the corner of the tile.
    """
    warpgroup = lax.axis_index(WARPGROUP)
    stores = [(part, number) for part in range(0, columns, STORED) for number in range(len(outputs))]
    for at, (part, number) in enumerate(stores):
        buffer = c_parts.at[warpgroup, at % STORES]
        value = value_of(number, slice(part, part + STORED)).astype(buffer.dtype)
        # The tile before may have ended with either buffer.
        plgpu.wait_smem_to_gmem(STORES - 1 if at else 0, wait_read_only=True)
        buffer[...] = value
        plgpu.commit_smem()
        target = pl.ds(row + warpgroup * OWN_ROWS, OWN_ROWS), pl.ds(column + part, STORED)
        plgpu.copy_smem_to_gmem(buffer, outputs[number].at[target])
