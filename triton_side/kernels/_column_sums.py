"""The last step of a gradient summed over rows: programs' partial sums [partials, columns] in fp32, added up.

Two steps and no atomics, so that results repeat bit for bit on one GPU model.
"""

import math

import torch
import triton
import triton.language as tl

from triton_side.declare import declare
from triton_side.kernels._launch import device_of


@declare(flops=lambda shapes: math.prod(shapes["partial_ptr"]))  # of what, the caller says
@triton.jit
def column_sums_kernel(
    partial_ptr, sum_ptr, partials, columns,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in tl.range(0, partials, ROWS):
        row = (start + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        mask = (row < partials) & (column < columns)
        total += tl.load(partial_ptr + row * columns + column, mask=mask, other=0.0)
    column_sums = tl.sum(total, axis=0, keep_dims=True)
    tl.store(sum_ptr + column, column_sums.to(sum_ptr.dtype.element_ty), mask=column < columns)


def sum_columns(partial: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The sums of the columns of a contiguous [partials, columns] fp32 matrix, [columns] in `dtype`."""
    partials, columns = partial.shape
    sums = torch.empty(columns, dtype=dtype, device=partial.device)
    with device_of(partial):
        # 32 columns in fp32 are the 128 bytes of a cache line, and 4096 columns give 128 programs; 256 rows are
        # a whole GPU's programs in one or two loads, because a loop of small ones would wait for L2 each time.
        column_sums_kernel[(triton.cdiv(columns, 32),)](
            partial, sums, partials, columns, ROWS=256, COLUMNS=32, num_warps=8
        )
    return sums
