"""Output tiles of a product with an inner axis that several programs share, for outputs of fewer tiles than programs.

Each program stores the sum of its share of the inner axis. A counter tells which program of a tile is the last; it adds
the shares in order, so results repeat bit for bit, and sets the counter back to zero.
"""

import triton
import triton.language as tl

from xlafuse.triton_side.kernels.shared.matmul_tiles import load_tile, store_tile


@triton.jit
def steps_of_split(split, k, BLOCK_K: tl.constexpr, SPLITS: tl.constexpr):
    """Return the first step along the inner axis of a split, and the one after its last; a late split may have none."""
    steps = tl.cdiv(k, BLOCK_K)
    each = tl.cdiv(steps, SPLITS)
    return tl.minimum(split * each, steps), tl.minimum((split + 1) * each, steps)


@triton.jit
def store_share(
    shares_ptr, counter_ptr, value, split, row, column, m, n,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, SPLITS: tl.constexpr,
):
    """Store a split's sum to shares [SPLITS, m, n]. Return whether all sums of its tile are stored."""
    store_tile(shares_ptr + tl.cast(split, tl.int64) * m * n, value, row, column, m, n, ROWS, COLUMNS)
    tl.debug_barrier()  # one thread counts, after the stores of all
    return tl.atomic_add(counter_ptr, 1) == SPLITS - 1


@triton.jit
def add_shares(
    shares_ptr, counter_ptr, row, column, m, n, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SPLITS: tl.constexpr
):
    """Return the sum of a tile's splits, in order, and prepare its counter for the next launch."""
    tl.store(counter_ptr, 0)
    value = load_tile(shares_ptr, row, column, m, n, ROWS, COLUMNS)
    for split in tl.static_range(1, SPLITS):
        value += load_tile(shares_ptr + tl.cast(split, tl.int64) * m * n, row, column, m, n, ROWS, COLUMNS)
    return value
