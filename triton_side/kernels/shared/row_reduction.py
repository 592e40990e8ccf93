"""Reductions over the rows of a matrix: tiles of whole rows, the running softmax of a row, and gradients of norms.

A norm's kernels recompute the normalised rows from saved statistics. RMSNorm has no mean and no bias; its kernels pass
None for the mean, and then compile without the code for both.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from xlafuse.triton_side.kernels.shared.constants import LOG2_E
from xlafuse.triton_side.kernels.shared.launch import RowConfig, cdiv, device_of, with_unit_column_stride

# ln 2 in two parts, the high one of 16 bits: k * LN_2_HIGH is exact in fp32 for |k| <= 255.
LN_2_HIGH = tl.constexpr(0.693145751953125)
LN_2_LOW = tl.constexpr(1.4286068203094172e-06)
# Adding and subtracting 1.5 * 2^23 rounds an fp32 number below 2^22 to an integer.
ROUNDING = tl.constexpr(12582912.0)


@triton.jit
def tile_of_rows(tile, rows, column, columns, ROWS: tl.constexpr):
    """Return the rows [ROWS, 1] of a tile, in 64 bits, and the mask of its elements at `column` [1, COLUMNS]."""
    row = (tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    return row, (row < rows) & (column < columns)


@triton.jit
def load(pointers, mask):
    """Return the elements in float32, zero outside the mask."""
    return tl.load(pointers, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def exp(x, ACCURATE: tl.constexpr):
    """Return exp(x) for x <= 0, to two ulps if ACCURATE; otherwise with up to |x| 2^-24 more relative error.

    The hardware's exponential has base 2, and rounding x log2(e) causes the error. 16-bit results do not show it; fp32
    results do (twice the error of exp in C). So fp32 computes exp(x) = 2^k exp(x - k ln 2). tl.exp has three more
    instructions, for results below 1e-38. The factor log2(e) follows the subtraction of a maximum in x; before it, a
    maximum of 1e4 would be rounded by 9e-4.
    """
    if ACCURATE:
        x = tl.where(x < -104.0, -104.0, x)  # exp(-104) is 0 in fp32; -inf would make the remainder NaN
        k = (x * LOG2_E + ROUNDING) - ROUNDING
        remainder = (x - k * LN_2_HIGH) - k * LN_2_LOW
        return tl.exp2(k) * tl.exp2(remainder * LOG2_E)
    else:
        return tl.exp2(x * LOG2_E)


@triton.jit
def add_to_softmax(maximum, total, x, ACCURATE: tl.constexpr):
    """Return each lane's maximum and sum of exp(x - maximum), [lanes, 1], with the elements x [lanes, VECTOR] added.

    A lane keeps its own, because a reduction over the row costs a barrier; it comes once. The maximum is finite from
    the start (`constants.LOWEST`), so an x of -inf differs from it by -inf, not NaN.
    """
    new_maximum = tl.maximum(maximum, tl.max(x, axis=1, keep_dims=True))
    total *= exp(maximum - new_maximum, ACCURATE)
    total += tl.sum(exp(x - new_maximum, ACCURATE), axis=1, keep_dims=True)
    return new_maximum, total


@triton.jit
def normalise(x, mask, columns, eps):
    """Return n, mean and rstd of whole rows of x, which is zero outside the mask."""
    mean = tl.sum(x, axis=1, keep_dims=True) / columns
    centred = tl.where(mask, x - mean, 0.0)
    rstd = tl.rsqrt(tl.sum(centred * centred, axis=1, keep_dims=True) / columns + eps)
    return centred * rstd, mean, rstd


@triton.jit
def normalise_gradient(dy, normalised, weight, rstd, columns, CENTRED: tl.constexpr):
    """Return dx of whole rows; dy is zero past their ends. RMSNorm's rows are not CENTRED."""
    dnormalised = dy * weight
    dmean = 0.0
    if CENTRED:
        dmean = tl.sum(dnormalised, axis=1, keep_dims=True) / columns
    projection = tl.sum(dnormalised * normalised, axis=1, keep_dims=True) / columns
    return rstd * (dnormalised - dmean - normalised * projection)


@triton.jit
def store_partials(partial_ptr, shares, column, columns, program):
    """Store a program's shares, summed over their rows, into partial [programs, len(shares), columns]."""
    partial_ptr += program * len(shares) * columns + column
    for vector in tl.static_range(len(shares)):
        total = tl.sum(shares[vector], axis=0, keep_dims=True)
        tl.store(partial_ptr + vector * columns, total, mask=column < columns)


@triton.jit
def norm_backward(
    x_ptr, weight_ptr, mean_ptr, rstd_ptr, dy_ptr, dsum_ptr, dx_ptr, x_row_stride, dy_row_stride, dsum_row_stride,
    column, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):
    """Compute dx of whole rows; return the program's shares of dweight and dbias. column: all, [1, COLUMNS]."""
    weight = tl.load(weight_ptr + column, mask=column < columns, other=0.0)
    dweight = tl.zeros([ROWS, COLUMNS], tl.float32)
    dbias = tl.zeros([ROWS, COLUMNS], tl.float32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        row, mask = tile_of_rows(tile, rows, column, columns, ROWS)
        x = load(x_ptr + row * x_row_stride + column, mask)
        dy = load(dy_ptr + row * dy_row_stride + column, mask)
        mean = 0.0 if mean_ptr is None else tl.load(mean_ptr + row, mask=row < rows, other=0.0)
        rstd = tl.load(rstd_ptr + row, mask=row < rows, other=0.0)
        normalised = (x - mean) * rstd  # past the row's end -mean rstd, and dy there is zero
        dx = normalise_gradient(dy, normalised, weight.to(tl.float32), rstd, columns, mean_ptr is not None)
        if dsum_ptr is not None:
            dx += load(dsum_ptr + row * dsum_row_stride + column, mask)
        tl.store(dx_ptr + row * columns + column, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        dweight += dy * normalised
        if mean_ptr is not None:
            dbias += dy
    return (dweight,) if mean_ptr is None else (dweight, dbias)


@triton.jit
def norm_backward_looped(
    x_ptr, weight_ptr, mean_ptr, rstd_ptr, dy_ptr, dsum_ptr, dx_ptr, x_row_stride, dy_row_stride, dsum_row_stride,
    rows, columns, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):
    """Compute dx alone, and read each row twice."""
    for row in tl.range(tl.program_id(0), rows, tl.num_programs(0)):
        x_row_ptr = x_ptr + tl.cast(row, tl.int64) * x_row_stride
        dy_row_ptr = dy_ptr + tl.cast(row, tl.int64) * dy_row_stride
        dsum_row = tl.cast(row, tl.int64) * dsum_row_stride
        dx_row_ptr = dx_ptr + tl.cast(row, tl.int64) * columns
        mean = 0.0 if mean_ptr is None else tl.load(mean_ptr + row)
        rstd = tl.load(rstd_ptr + row)
        products = tl.zeros([COLUMNS], tl.float32)
        gradients = tl.zeros([COLUMNS], tl.float32)
        for start in tl.range(0, columns, COLUMNS, num_stages=STAGES):
            column = start + tl.arange(0, COLUMNS)
            x = load(x_row_ptr + column, column < columns)
            dy = load(dy_row_ptr + column, column < columns)
            weight = load(weight_ptr + column, column < columns)
            products += dy * weight * ((x - mean) * rstd)
            if mean_ptr is not None:
                gradients += dy * weight
        projection = tl.sum(products, axis=0) / columns
        dmean = 0.0 if mean_ptr is None else tl.sum(gradients, axis=0) / columns
        for start in tl.range(0, columns, COLUMNS, num_stages=STAGES):
            column = start + tl.arange(0, COLUMNS)
            x = load(x_row_ptr + column, column < columns)
            dy = load(dy_row_ptr + column, column < columns)
            weight = load(weight_ptr + column, column < columns)
            dx = rstd * (dy * weight - dmean - (x - mean) * rstd * projection)
            if dsum_ptr is not None:
                dx += load(dsum_ptr + dsum_row + column, column < columns)
            tl.store(dx_row_ptr + column, dx.to(dx_ptr.dtype.element_ty), mask=column < columns)


@triton.jit
def norm_shares(
    x_ptr, mean_ptr, rstd_ptr, dy_ptr, x_row_stride, dy_row_stride, column, rows, columns,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):
    """Return the program's shares of dweight and dbias at `column` [1, COLUMNS]."""
    dweight = tl.zeros([ROWS, COLUMNS], tl.float32)
    dbias = tl.zeros([ROWS, COLUMNS], tl.float32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        row, mask = tile_of_rows(tile, rows, column, columns, ROWS)
        x = load(x_ptr + row * x_row_stride + column, mask)
        dy = load(dy_ptr + row * dy_row_stride + column, mask)
        mean = 0.0 if mean_ptr is None else tl.load(mean_ptr + row, mask=row < rows, other=0.0)
        rstd = tl.load(rstd_ptr + row, mask=row < rows, other=0.0)
        dweight += dy * ((x - mean) * rstd)
        if mean_ptr is not None:
            dbias += dy
    return (dweight,) if mean_ptr is None else (dweight, dbias)


class NormKernels(NamedTuple):
    """The backward kernels of a norm.

    whole_rows: for rows in registers. looped, partials: for longer rows, dx and the shares of the vectors' gradients.
    halves: for rows of two tiles, which two programs share.
    """

    whole_rows: Any
    looped: Any
    partials: Any
    halves: Any = None


def launch_norm_backward(
    kernels: NormKernels, x: torch.Tensor, weight: torch.Tensor, statistics: tuple[torch.Tensor, ...],
    dy: torch.Tensor, dsum: torch.Tensor | None, dx: torch.Tensor, partial: torch.Tensor, config: RowConfig,
) -> None:
    """Write dx, and each program's shares of the vectors' gradients into `partial`.

    statistics: of x's rows, which the kernels take between weight and dy.
    """
    rows, columns = x.shape
    x, dy = with_unit_column_stride(x), with_unit_column_stride(dy)
    dsum = None if dsum is None else with_unit_column_stride(dsum)
    tensors = (x, weight.contiguous(), *statistics, dy, dsum, dx)
    strides = (x.stride(0), dy.stride(0), 0 if dsum is None else dsum.stride(0))
    with device_of(x):
        if kernels.halves and config.block_columns < columns <= 2 * config.block_columns:
            kernels.halves[(2, config.programs)](*tensors, partial, *strides, rows, columns, **config.looped)
        elif config.block_columns < columns:
            kernels.looped[(config.programs,)](*tensors, *strides, rows, columns, **config.looped)
            kernels.partials[(config.programs, cdiv(columns, 1024))](
                x, *statistics, dy, partial, *strides[:2], rows, columns, ROWS=4, COLUMNS=1024, num_warps=8
            )
        else:
            kernels.whole_rows[(config.programs,)](*tensors, partial, *strides, rows, columns, **config.whole_rows)
