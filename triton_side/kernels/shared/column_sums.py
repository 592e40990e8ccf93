"""Sums over the rows of a matrix in two steps: fp32 partial sums, one row a program, then the sums of these.

The gradients of vectors along a matrix's columns are such sums. The second step sums up to three vectors in one launch.
Kernels that compute the summed gradient themselves also do the first step. There are no atomics, so sums repeat bit for
bit on one GPU model.
"""

import math

import torch
import triton
import triton.language as tl

from xlafuse.triton_side.calls import declare
from xlafuse.triton_side.kernels.shared.launch import (
    cdiv,
    device_of,
    multiprocessors,
    next_power_of_2,
    with_unit_column_stride,
)
from xlafuse.triton_side.kernels.shared.row_reduction import load, tile_of_rows


@declare.declare(flops=lambda shapes: math.prod(shapes["x_ptr"]))  # the caller declares the operation
@triton.jit
def partial_sums_kernel(
    x_ptr, partial_ptr, x_row_stride, rows, columns,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):
    """Program (i, p) sums every num_programs(1)-th tile of columns i COLUMNS .., in fp32."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    shares = tl.zeros([ROWS, COLUMNS], tl.float32)
    for tile in tl.range(tl.program_id(1), tl.cdiv(rows, ROWS), tl.num_programs(1), num_stages=STAGES):
        row, mask = tile_of_rows(tile, rows, column, columns, ROWS)
        shares += load(x_ptr + row * x_row_stride + column, mask)
    partial = tl.sum(shares, axis=0, keep_dims=True)
    tl.store(partial_ptr + tl.program_id(1).to(tl.int64) * columns + column, partial, mask=column < columns)


def partial_sums(x: torch.Tensor) -> torch.Tensor:
    """Return fp32 [programs, columns] whose sum over the first axis is that of x [rows, columns], any strides."""
    x = with_unit_column_stride(x)
    rows, columns = x.shape
    # A tile is 32 elements a thread for four warps, and two tiles are prefetched. Each program writes a row of partial
    # sums that is read again. So there are only as many programs as run at once, eight a multiprocessor, with at least
    # four tiles each.
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


@declare.declare(flops=lambda shapes: math.prod(shapes["partial_ptr"]))  # the caller declares the operation
@triton.jit
def sum_columns_kernel(
    partial_ptr, sum_ptr, sum2_ptr, sum3_ptr, partials, columns,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):
    """Program (i, v) sums columns i COLUMNS .. of vector v; partial is [partials, vectors, columns]."""
    vector = tl.program_id(1)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in tl.range(0, partials, ROWS):
        row = (start + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        mask = (row < partials) & (column < columns)
        offset = (row * tl.num_programs(1) + vector) * columns + column
        total += tl.load(partial_ptr + offset, mask=mask, other=0.0)
    sums = tl.sum(total, axis=0, keep_dims=True).to(sum_ptr.dtype.element_ty)
    # Masks, not branches: from three branches that store one value, Triton 3.6 makes invalid IR (an operand does not
    # dominate its use).
    inside = column < columns
    tl.store(sum_ptr + column, sums, mask=inside & (vector == 0))
    if sum2_ptr is not None:
        tl.store(sum2_ptr + column, sums, mask=inside & (vector == 1))
    if sum3_ptr is not None:
        tl.store(sum3_ptr + column, sums, mask=inside & (vector == 2))


def sum_vectors(partial: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Return one sum over the first axis, [columns] in `dtype`, for each vector of `partial`.

    partial: contiguous fp32 [partials, vectors, columns] of at most three vectors. The caller declares the operation
    and names the sums by the parameters sum_ptr, sum2_ptr, sum3_ptr.
    """
    partials, vectors, columns = partial.shape
    sums = tuple(torch.empty(columns, dtype=dtype, device=partial.device) for _ in range(vectors))
    # 32 columns in fp32 fill a cache line of 128 bytes, and 4096 columns give 128 programs. A tile of 256 rows covers a
    # whole GPU's partial sums in one or two loads; a loop of small loads would wait for L2 each time.
    with device_of(partial):
        sum_columns_kernel[(cdiv(columns, 32), vectors)](
            partial, *sums, *[None] * (3 - vectors), partials, columns, ROWS=256, COLUMNS=32, num_warps=8
        )
    return sums


def sum_columns(partial: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return `sum_vectors` of one vector: partial [partials, columns], of any dtype -> [columns]."""
    return sum_vectors(partial.unsqueeze(1), dtype)[0]
