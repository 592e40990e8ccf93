"""Sums over the rows of a matrix, as the gradients of vectors along its columns are: the second of two steps.

A persistent kernel adds its rows' share of each vector up in registers and writes it once, a row of partial sums to a
program; this adds the programs' shares. No atomics, so that results repeat bit for bit on one GPU model.
"""

import math

import torch
import triton
import triton.language as tl

from triton_side import declare


@declare.declare(flops=lambda shapes: math.prod(shapes["partial_ptr"]))  # of what, the caller says
@triton.jit
def sum_partials_kernel(
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
    if vector == 0:
        tl.store(sum_ptr + column, sums, mask=column < columns)
    if sum2_ptr is not None:
        if vector == 1:
            tl.store(sum2_ptr + column, sums, mask=column < columns)
    if sum3_ptr is not None:
        if vector == 2:
            tl.store(sum3_ptr + column, sums, mask=column < columns)


def sum_partials(
    partial: torch.Tensor, dtype: torch.dtype, *sums: tuple[str, declare.Computed]
) -> tuple[torch.Tensor, ...]:
    """partial [programs, vectors, columns] in fp32 -> one vector [columns] of `dtype` for each of `sums`: its name, and
    the reduction that it is the result of. At most three, in one launch on the current device."""
    partials, vectors, columns = partial.shape
    made = tuple(torch.empty(columns, dtype=dtype, device=partial.device) for _ in range(vectors))
    names = {parameter: name for parameter, (name, _) in zip(("sum_ptr", "sum2_ptr", "sum3_ptr"), sums, strict=False)}
    # 32 columns in fp32 are the 128 bytes of a cache line, and 4096 columns give 128 programs; 256 rows are
    # a whole GPU's programs in one or two loads, because a loop of small ones would wait for L2 each time.
    with declare.computing(*(computed for _, computed in sums), **names):
        sum_partials_kernel[(triton.cdiv(columns, 32), vectors)](
            partial, *made, *[None] * (3 - vectors), partials, columns, ROWS=256, COLUMNS=32, num_warps=8
        )
    return made
