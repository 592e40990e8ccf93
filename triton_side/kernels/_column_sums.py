"""Sums over the rows of a matrix, in two steps: fp32 partial sums, one row of them from each program that shared out
the work, and the sums of those.

The gradients of vectors along a matrix's columns are such sums; the second step makes up to three in one launch.
Kernels that compute a gradient before they sum it up take the first step themselves. No atomics, so that sums repeat
bit for bit on one GPU model.
"""

import math

import torch
import triton
import triton.language as tl

from triton_side.calls import declare
from triton_side.kernels._launch import cdiv, device_of, multiprocessors, next_power_of_2, with_unit_column_stride


@declare.declare(flops=lambda shapes: math.prod(shapes["x_ptr"]))  # of what, the caller says
@triton.jit
def partial_sums_kernel(
    x_ptr, partial_ptr, x_row_stride, rows, columns,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):
    """Program (i, p) sums every num_programs(1)-th tile of columns i COLUMNS .., in fp32."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    shares = tl.zeros([ROWS, COLUMNS], tl.float32)
    for tile in tl.range(tl.program_id(1), tl.cdiv(rows, ROWS), tl.num_programs(1), num_stages=STAGES):
        row = (tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        mask = (row < rows) & (column < columns)
        shares += tl.load(x_ptr + row * x_row_stride + column, mask=mask, other=0.0).to(tl.float32)
    partial = tl.sum(shares, axis=0, keep_dims=True)
    tl.store(partial_ptr + tl.program_id(1).to(tl.int64) * columns + column, partial, mask=column < columns)


def partial_sums(x: torch.Tensor) -> torch.Tensor:
    """fp32 [programs, columns] whose sum over the first axis is that of x [rows, columns], any strides."""
    x = with_unit_column_stride(x)
    rows, columns = x.shape
    # A tile is 32 elements to a thread of four warps; two are on their way. A program costs a row of partial sums
    # written and read again: no more than have room at once, eight to a multiprocessor, and four tiles or more to each.
    block_columns = min(512, next_power_of_2(max(1, columns)))
    block_rows = 4096 // block_columns
    resident = max(1, 8 * multiprocessors(x.device) // max(1, cdiv(columns, block_columns)))
    programs = min(cdiv(rows, 4 * block_rows), resident)
    partial = torch.empty((programs, columns), dtype=torch.float32, device=x.device)
    with device_of(x):
        partial_sums_kernel[(cdiv(columns, block_columns), programs)](
            x, partial, x.stride(0), rows, columns, ROWS=block_rows, COLUMNS=block_columns, STAGES=3, num_warps=4
        )
    return partial


@declare.declare(flops=lambda shapes: math.prod(shapes["partial_ptr"]))  # of what, the caller says
@triton.jit
def sum_columns_kernel(
    partial_ptr, sum_ptr, sum2_ptr, sum3_ptr, partials, columns,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):
    """Program (i, v) makes columns i COLUMNS .. of vector v: partial is [partials, vectors, columns]."""
    vector = tl.program_id(1)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in tl.range(0, partials, ROWS):
        row = (start + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        mask = (row < partials) & (column < columns)
        offset = (row * tl.num_programs(1) + vector) * columns + column
        total += tl.load(partial_ptr + offset, mask=mask, other=0.0)
    sums = tl.sum(total, axis=0, keep_dims=True).to(sum_ptr.dtype.element_ty)
    # Masks, not branches: of three branches that store one value Triton 3.6 makes invalid IR (an operand that does not
    # dominate its use).
    inside = column < columns
    tl.store(sum_ptr + column, sums, mask=inside & (vector == 0))
    if sum2_ptr is not None:
        tl.store(sum2_ptr + column, sums, mask=inside & (vector == 1))
    if sum3_ptr is not None:
        tl.store(sum3_ptr + column, sums, mask=inside & (vector == 2))


def sum_vectors(partial: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """The sums, one [columns] in `dtype` for each vector, over the first axis of a contiguous fp32 `partial`
    [partials, vectors, columns] of at most three vectors. The caller says what is computed, and names the sums, of the
    parameters sum_ptr, sum2_ptr, sum3_ptr."""
    partials, vectors, columns = partial.shape
    sums = tuple(torch.empty(columns, dtype=dtype, device=partial.device) for _ in range(vectors))
    # 32 columns in fp32 are the 128 bytes of a cache line, and 4096 columns give 128 programs; 256 rows are
    # a whole GPU's programs in one or two loads, because a loop of small ones would wait for L2 each time.
    with device_of(partial):
        sum_columns_kernel[(cdiv(columns, 32), vectors)](
            partial, *sums, *[None] * (3 - vectors), partials, columns, ROWS=256, COLUMNS=32, num_warps=8
        )
    return sums


def sum_columns(partial: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`sum_vectors` of one vector: partial [partials, columns] -> [columns]."""
    return sum_vectors(partial[:, None], dtype)[0]
