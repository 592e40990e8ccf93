"""The end of a sum over rows without atomics: each program leaves its share as a row of fp32, one kernel adds them."""

import math

import torch
import triton
import triton.language as tl

from triton_side import declare

# 32 columns in fp32 are the 128 bytes of a cache line, and 4096 columns give 128 programs; 256 rows are a whole GPU's
# programs in one or two loads, because a loop of small ones would wait for L2 each time.
ROWS, COLUMNS = 256, 32


@declare.declare(flops=lambda shapes: math.prod(shapes["partial_ptr"]))  # of what, the caller says
@triton.jit
def sum_partials_kernel(
    partial_ptr, out_ptr, out2_ptr, partials, columns,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """out2_ptr: of a second sum, whose partials follow the first's; None where there is one."""
    which = tl.program_id(1)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in tl.range(0, partials, ROWS):
        row = (start + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        mask = (row < partials) & (column < columns)
        total += tl.load(partial_ptr + (which * partials + row) * columns + column, mask=mask, other=0.0)
    out = tl.sum(total, axis=0, keep_dims=True).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + column, out, mask=(column < columns) & (which == 0))
    if out2_ptr is not None:
        tl.store(out2_ptr + column, out, mask=(column < columns) & (which == 1))


def sum_partials(partial: torch.Tensor, out: torch.Tensor, out2: torch.Tensor | None = None) -> None:
    """Fill out [columns], and out2, with the sums of partial [sums, partials, columns] over its second axis; the
    caller has made the device current and said what is computed."""
    sums, partials, columns = partial.shape
    sum_partials_kernel[(triton.cdiv(columns, COLUMNS), sums)](
        partial, out, out2, partials, columns, ROWS=ROWS, COLUMNS=COLUMNS, num_warps=8
    )
