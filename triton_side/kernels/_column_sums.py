"""Sums over the rows of a matrix of fp32 partial sums: one row of them from each program that shared out the work.

The gradients of vectors along a matrix's columns are such sums; up to three are made in one launch. No atomics, so that
sums repeat bit for bit on one GPU model.
"""

import math

import torch
import triton
import triton.language as tl

from triton_side import declare
from triton_side.kernels._launch import device_of


@declare.declare(flops=lambda shapes: math.prod(shapes["partial_ptr"]))  # of what, the caller says
@triton.jit
def sum_columns_kernel(
    partial_ptr, sum_ptr, sum2_ptr, sum3_ptr, partials, columns,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
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
        sum_columns_kernel[(triton.cdiv(columns, 32), vectors)](
            partial, *sums, *[None] * (3 - vectors), partials, columns, ROWS=256, COLUMNS=32, num_warps=8
        )
    return sums


def sum_columns(partial: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`sum_vectors` of one vector: partial [partials, columns] -> [columns]."""
    return sum_vectors(partial[:, None], dtype)[0]
