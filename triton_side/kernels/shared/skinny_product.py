"""Products of a few rows, c = a @ b: as fast as b, the weight, can be read."""

import triton
import triton.language as tl

from triton_side.kernels.shared.tiles import add_product


@triton.jit
def load_strided(
    pointer, row, column, rows, columns, stride_row, stride_column, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    r = tl.arange(0, ROWS)[:, None]
    c = tl.arange(0, COLUMNS)[None, :]
    origin = pointer + (tl.cast(row, tl.int64) * stride_row + tl.cast(column, tl.int64) * stride_column)
    inside = (r < rows - row) & (c < columns - column)
    return tl.load(origin + (r * stride_row + c * stride_column), mask=inside, other=0.0)


@triton.jit
def skinny_kernel(
    a_ptr, b_ptr, a_scale_ptr, b_scale_ptr, c_ptr, partial_ptr, arrived_ptr, m, n, k, stride_am, stride_ak, stride_bk, stride_bn,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLITS: tl.constexpr, STAGGER: tl.constexpr,
    PRECISION: tl.constexpr,
):
    column = tl.program_id(0) * BLOCK_N
    split = tl.program_id(1)
    steps = tl.cdiv(k, BLOCK_K)
    first = split * steps // SPLITS
    count = (split + 1) * steps // SPLITS - first
    if STAGGER > 0:
        turn = tl.program_id(0) // STAGGER * count * STAGGER // tl.num_programs(0)
    else:
        turn = 0
    c = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for step in range(count):
        at = (first + (step + turn) % count) * BLOCK_K
        x = load_strided(a_ptr, 0, at, m, k, stride_am, stride_ak, BLOCK_M, BLOCK_K)
        y = load_strided(b_ptr, at, column, k, n, stride_bk, stride_bn, BLOCK_K, BLOCK_N)
        c = add_product(c, x, y, PRECISION)
    r = tl.arange(0, BLOCK_M)[:, None]
    column += tl.arange(0, BLOCK_N)[None, :]
    inside = (r < m) & (column < n)
    at = r * n + column
    if SPLITS > 1:
        tl.store(partial_ptr + split * m * n + at, c, mask=inside)
        tl.debug_barrier()
        last = tl.atomic_add(arrived_ptr + tl.program_id(0), 1, sem="acq_rel") == SPLITS - 1
        if last:
            c = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            for part in tl.static_range(SPLITS):
                c += tl.load(partial_ptr + part * m * n + at, mask=inside, other=0.0, cache_modifier=".cg")
            if a_scale_ptr is not None:
                c *= tl.load(a_scale_ptr) * tl.load(b_scale_ptr)
            tl.store(c_ptr + at, c.to(c_ptr.dtype.element_ty), mask=inside)
            tl.store(arrived_ptr + tl.program_id(0), 0)
    else:
        if a_scale_ptr is not None:
            c *= tl.load(a_scale_ptr) * tl.load(b_scale_ptr)
        tl.store(c_ptr + at, c.to(c_ptr.dtype.element_ty), mask=inside)
