"""Sums over the rows of a matrix of fp32 partial sums: one row of them from each program that shared out the work.

No atomics, so that sums repeat bit for bit on one GPU model.
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
    partial_ptr, sum_ptr, partials, columns,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in tl.range(0, partials, ROWS):
        row = (start + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        mask = (row < partials) & (column < columns)
        total += tl.load(partial_ptr + row * columns + column, mask=mask, other=0.0)
    total = tl.sum(total, axis=0, keep_dims=True)
    tl.store(sum_ptr + column, total.to(sum_ptr.dtype.element_ty), mask=column < columns)


def sum_columns(partial: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The sum [columns], in `dtype`, over the rows of a contiguous fp32 `partial` [partials, columns]."""
    partials, columns = partial.shape
    total = torch.empty(columns, dtype=dtype, device=partial.device)
    # 32 columns in fp32 are the 128 bytes of a cache line, and 4096 columns give 128 programs; 256 rows are
    # a whole GPU's programs in one or two loads, because a loop of small ones would wait for L2 each time.
    with device_of(partial):
        sum_columns_kernel[(triton.cdiv(columns, 32),)](
            partial, total, partials, columns, ROWS=256, COLUMNS=32, num_warps=8
        )
    return total
