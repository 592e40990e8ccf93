"""Root-mean-square normalisation over the columns of a matrix, forward and backward.

    rstd = 1 / sqrt(mean(x^2) + eps)       y  = n w,  n = x rstd
    dx = rstd (g - n mean(g n)),  g = dy w      dw = sum over rows of dy n

Zhang and Sennrich, "Root Mean Square Layer Normalization", arXiv:1910.07467. Shapes: x, y, dy, dx
[rows, columns], weight, dweight [columns], rstd [rows] in fp32, saved only where a gradient is wanted.
bfloat16, float16 or float32 in and out; fp32 inside, rounded once at the end.

The backward kernel is a persistent grid: each program adds its rows' share of dweight up in registers and
writes it once, and a second kernel adds the programs' shares. No atomics, so that results repeat bit for bit on
one GPU model. Rows too long for the registers are walked twice, and dweight takes a reading of its own.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from triton_side import declare
from triton_side.kernels._column_sums import sum_columns
from triton_side.kernels._launch import (
    RowConfig,
    check_matrix,
    check_tensors,
    device_of,
    multiprocessors,
    rows_a_tile,
    with_unit_column_stride,
)

# What the kernels compute, in the stages of the block: of the forward pass, of dx, and of dweight before and after the
# sum over programs. rstd is saved, so that the backward pass repeats no sum, but the normalised rows.
FORWARD = (
    declare.forward("mul", "mean_square"), declare.forward("reduce_sum", "mean_square"),
    declare.forward("rsqrt", "normalize"), declare.forward("mul", "normalize"), declare.forward("mul", "weight"),
)  # fmt: skip
NORMALIZED_AGAIN = declare.again("mul", "normalize")
DX = (
    declare.gradient("mul", "weight", "dnormalised"), declare.gradient("reduce_sum", "normalize", "projection"),
    declare.gradient("mul", "normalize", "dx"), declare.gradient("mul", "mean_square", "dx"),
)  # fmt: skip
PARTIAL_DWEIGHT = (
    declare.gradient("mul", "weight", "dweight"), declare.gradient("reduce_sum", "weight", "partial"),
)  # fmt: skip
DWEIGHT = declare.gradient("reduce_sum", "weight", "dweight")


@declare.declare(*FORWARD, flops=lambda shapes: 4 * math.prod(shapes["x_ptr"]))
@triton.jit
def rmsnorm_forward_kernel(
    x_ptr, weight_ptr, y_ptr, rstd_ptr, x_row_stride, rows, columns, eps,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, COLUMNS)[None, :]
    weight = tl.load(weight_ptr + column, mask=column < columns, other=0.0)
    for tile in tl.range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        row = (tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        mask = (row < rows) & (column < columns)
        x = tl.load(x_ptr + row * x_row_stride + column, mask=mask, other=0.0).to(tl.float32)
        rstd = tl.rsqrt(tl.sum(x * x, axis=1, keep_dims=True) / columns + eps)
        y = x * rstd * weight.to(tl.float32)
        tl.store(y_ptr + row * columns + column, y.to(y_ptr.dtype.element_ty), mask=mask)
        if rstd_ptr is not None:
            tl.store(rstd_ptr + row, rstd, mask=row < rows)


@declare.declare(*FORWARD, flops=lambda shapes: 4 * math.prod(shapes["x_ptr"]))
@triton.jit
def rmsnorm_forward_looped_kernel(
    x_ptr, weight_ptr, y_ptr, rstd_ptr, x_row_stride, rows, columns, eps,
    COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    for row in tl.range(tl.program_id(0), rows, tl.num_programs(0)):
        x_row_ptr = x_ptr + tl.cast(row, tl.int64) * x_row_stride
        y_row_ptr = y_ptr + tl.cast(row, tl.int64) * columns
        squares = tl.zeros([COLUMNS], tl.float32)
        for start in tl.range(0, columns, COLUMNS, num_stages=STAGES):
            column = start + tl.arange(0, COLUMNS)
            x = tl.load(x_row_ptr + column, mask=column < columns, other=0.0).to(tl.float32)
            squares += x * x
        rstd = tl.rsqrt(tl.sum(squares, axis=0) / columns + eps)
        if rstd_ptr is not None:
            tl.store(rstd_ptr + row, rstd)
        for start in tl.range(0, columns, COLUMNS, num_stages=STAGES):
            column = start + tl.arange(0, COLUMNS)
            x = tl.load(x_row_ptr + column, mask=column < columns, other=0.0).to(tl.float32)
            weight = tl.load(weight_ptr + column, mask=column < columns, other=0.0).to(tl.float32)
            y = x * rstd * weight
            tl.store(y_row_ptr + column, y.to(y_ptr.dtype.element_ty), mask=column < columns)


@declare.declare(NORMALIZED_AGAIN, *DX, *PARTIAL_DWEIGHT, flops=lambda shapes: 9 * math.prod(shapes["x_ptr"]))
@triton.jit
def rmsnorm_backward_kernel(
    x_ptr, weight_ptr, rstd_ptr, dy_ptr, dx_ptr, partial_ptr, x_row_stride, dy_row_stride, rows, columns,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, COLUMNS)[None, :]
    weight = tl.load(weight_ptr + column, mask=column < columns, other=0.0)
    dweight = tl.zeros([ROWS, COLUMNS], tl.float32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        row = (tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        mask = (row < rows) & (column < columns)
        x = tl.load(x_ptr + row * x_row_stride + column, mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + row * dy_row_stride + column, mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row, mask=row < rows, other=0.0)
        normalised = x * rstd
        dnormalised = dy * weight.to(tl.float32)
        projection = tl.sum(dnormalised * normalised, axis=1, keep_dims=True) / columns
        dx = rstd * (dnormalised - normalised * projection)
        tl.store(dx_ptr + row * columns + column, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        dweight += dy * normalised
    partial = tl.sum(dweight, axis=0, keep_dims=True)
    tl.store(partial_ptr + tl.program_id(0) * columns + column, partial, mask=column < columns)


@declare.declare(NORMALIZED_AGAIN, *DX, flops=lambda shapes: 9 * math.prod(shapes["x_ptr"]))
@triton.jit
def rmsnorm_backward_looped_kernel(
    x_ptr, weight_ptr, rstd_ptr, dy_ptr, dx_ptr, x_row_stride, dy_row_stride, rows, columns,
    COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    for row in tl.range(tl.program_id(0), rows, tl.num_programs(0)):
        x_row_ptr = x_ptr + tl.cast(row, tl.int64) * x_row_stride
        dy_row_ptr = dy_ptr + tl.cast(row, tl.int64) * dy_row_stride
        dx_row_ptr = dx_ptr + tl.cast(row, tl.int64) * columns
        rstd = tl.load(rstd_ptr + row)
        products = tl.zeros([COLUMNS], tl.float32)
        for start in tl.range(0, columns, COLUMNS, num_stages=STAGES):
            column = start + tl.arange(0, COLUMNS)
            x = tl.load(x_row_ptr + column, mask=column < columns, other=0.0).to(tl.float32)
            dy = tl.load(dy_row_ptr + column, mask=column < columns, other=0.0).to(tl.float32)
            weight = tl.load(weight_ptr + column, mask=column < columns, other=0.0).to(tl.float32)
            products += dy * weight * (x * rstd)
        projection = tl.sum(products, axis=0) / columns
        for start in tl.range(0, columns, COLUMNS, num_stages=STAGES):
            column = start + tl.arange(0, COLUMNS)
            x = tl.load(x_row_ptr + column, mask=column < columns, other=0.0).to(tl.float32)
            dy = tl.load(dy_row_ptr + column, mask=column < columns, other=0.0).to(tl.float32)
            weight = tl.load(weight_ptr + column, mask=column < columns, other=0.0).to(tl.float32)
            dx = rstd * (dy * weight - x * rstd * projection)
            tl.store(dx_row_ptr + column, dx.to(dx_ptr.dtype.element_ty), mask=column < columns)


@declare.declare(NORMALIZED_AGAIN, *PARTIAL_DWEIGHT, flops=lambda shapes: 3 * math.prod(shapes["x_ptr"]))
@triton.jit
def rmsnorm_partial_dweight_kernel(
    x_ptr, rstd_ptr, dy_ptr, partial_ptr, x_row_stride, dy_row_stride, rows, columns,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    dweight = tl.zeros([ROWS, COLUMNS], tl.float32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        row = (tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        mask = (row < rows) & (column < columns)
        x = tl.load(x_ptr + row * x_row_stride + column, mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + row * dy_row_stride + column, mask=mask, other=0.0).to(tl.float32)
        dweight += dy * (x * tl.load(rstd_ptr + row, mask=row < rows, other=0.0))
    partial = tl.sum(dweight, axis=0, keep_dims=True)
    tl.store(partial_ptr + tl.program_id(0).to(tl.int64) * columns + column, partial, mask=column < columns)


def configure_forward(rows: int, columns: int, element_bytes: int, multiprocessors: int) -> RowConfig:
    """Thirty-two elements to a thread, for four 16-byte loads in flight; long rows persistent, the longest walked.

    bfloat16 on an H200, GB/s: 4096 columns 4119 with 4 warps, 3975 with 8, 3865 with 4 and a prefetch, a copy has
    4153; 8192 columns 3990 with 8 warps, 3292 with 16, 3862 with 8 and a prefetch. At 16,384 columns one
    program takes a multiprocessor (102 registers a thread), too few to hide the loads without a prefetch.
    """
    block = triton.next_power_of_2(columns)
    if block > 16384:
        return RowConfig(1, 8192, 32, 1, min(rows, multiprocessors))
    if block > 8192:
        stages = 3 if element_bytes == 2 else 2
        return RowConfig(1, block, 16, stages, min(rows, multiprocessors))
    block_rows = rows_a_tile(rows, block, multiprocessors)
    num_warps = max(1, block * block_rows // 1024)
    return RowConfig(block_rows, block, num_warps, 1, triton.cdiv(rows, block_rows))


def configure_backward(rows: int, columns: int, element_bytes: int, multiprocessors: int) -> RowConfig:
    """One resident set of programs; each holds x, dy, the weight and its share of dweight in registers.

    Few programs, because each costs a row of fp32 partial sums written and read again, and two tiles on their way
    to each: bfloat16 on an H200 reaches 3946 GB/s at 4096 columns and 3954 at 8192, with one tile on its way 3214
    and 2749. At 16,384 columns 44 of the 128 registers a
    thread spill, and two such tiles in fp32 exceed shared memory.
    """
    block = triton.next_power_of_2(columns)
    if block > 16384:
        return RowConfig(1, 8192, 32, 1, min(rows, multiprocessors))
    block_rows = rows_a_tile(rows, block, multiprocessors)
    tile = block * block_rows
    stages = 3 if tile * element_bytes <= 32768 else 2
    resident = multiprocessors * max(1, min(16, 8192 // tile))
    return RowConfig(block_rows, block, max(1, tile // 1024), stages, min(triton.cdiv(rows, block_rows), resident))


def forward(
    x: torch.Tensor, weight: torch.Tensor, eps: float, *, save_rstd: bool, config: RowConfig | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Launch the forward kernel: y [rows, columns], contiguous, in x's dtype; rstd [rows] in fp32 or None."""
    rows, columns = x.shape
    y = torch.empty((rows, columns), dtype=x.dtype, device=x.device)
    rstd = torch.empty(rows, dtype=torch.float32, device=x.device) if save_rstd else None
    if y.numel() == 0:
        return y, rstd
    x = with_unit_column_stride(x)
    weight = weight.contiguous()
    config = config or configure_forward(rows, columns, x.element_size(), multiprocessors(x.device))
    with device_of(x):
        if config.block_columns < columns:
            rmsnorm_forward_looped_kernel[(config.programs,)](
                x, weight, y, rstd, x.stride(0), rows, columns, eps,
                COLUMNS=config.block_columns, STAGES=config.num_stages, num_warps=config.num_warps,
            )  # fmt: skip
        else:
            rmsnorm_forward_kernel[(config.programs,)](
                x, weight, y, rstd, x.stride(0), rows, columns, eps,
                ROWS=config.block_rows, COLUMNS=config.block_columns, STAGES=config.num_stages,
                num_warps=config.num_warps,
            )  # fmt: skip
    return y, rstd


def backward(
    x: torch.Tensor,
    weight: torch.Tensor,
    rstd: torch.Tensor,
    dy: torch.Tensor,
    config: RowConfig | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the backward kernels: dx [rows, columns], contiguous, and dweight [columns], in x's dtype."""
    rows, columns = x.shape
    dx = torch.empty((rows, columns), dtype=x.dtype, device=x.device)
    if dx.numel() == 0:
        return dx, torch.zeros(columns, dtype=x.dtype, device=x.device)
    x, dy = with_unit_column_stride(x), with_unit_column_stride(dy)
    weight = weight.contiguous()
    config = config or configure_backward(rows, columns, x.element_size(), multiprocessors(x.device))
    partial = torch.empty((config.programs, columns), dtype=torch.float32, device=x.device)
    with device_of(x):
        if config.block_columns < columns:
            rmsnorm_backward_looped_kernel[(config.programs,)](
                x, weight, rstd, dy, dx, x.stride(0), dy.stride(0), rows, columns,
                COLUMNS=config.block_columns, STAGES=config.num_stages, num_warps=config.num_warps,
            )  # fmt: skip
            rmsnorm_partial_dweight_kernel[(config.programs, triton.cdiv(columns, 1024))](
                x, rstd, dy, partial, x.stride(0), dy.stride(0), rows, columns,
                ROWS=4, COLUMNS=1024, num_warps=8,
            )  # fmt: skip
        else:
            rmsnorm_backward_kernel[(config.programs,)](
                x, weight, rstd, dy, dx, partial, x.stride(0), dy.stride(0), rows, columns,
                ROWS=config.block_rows, COLUMNS=config.block_columns, STAGES=config.num_stages,
                num_warps=config.num_warps,
            )  # fmt: skip
    with declare.computing(DWEIGHT, sum_ptr="dweight"):
        dweight = sum_columns(partial, x.dtype)
    return dx, dweight


class RMSNormFunction(torch.autograd.Function):
    """Saves x, weight and rstd; the backward pass reads x and dy once and writes dx and dweight."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        y, rstd = forward(x, weight, eps, save_rstd=True)
        ctx.save_for_backward(x, weight, rstd)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        x, weight, rstd = ctx.saved_tensors
        dx, dweight = backward(x, weight, rstd, dy)
        return dx, dweight, None


def rmsnorm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the columns of x, differentiable once in x and weight.

    Args:
        x: [rows, columns], bfloat16, float16 or float32, on a GPU. Rows may be any distance apart; a matrix
            whose columns are not neighbours in memory is copied.
        weight: [columns], of x's dtype and device.
        eps: added to the mean square.

    Returns:
        A new contiguous [rows, columns] tensor of x's dtype.

    Raises:
        ValueError: the shapes or devices do not fit, or the tensors are not on a GPU.
        TypeError: dtypes differ or are not supported.
    """
    check_tensors(x=x, weight=weight)
    check_matrix("x", x)
    if weight.shape != x.shape[1:]:
        raise ValueError(
            f"weight must be [columns] = [{x.shape[1]}] for x of shape {tuple(x.shape)}, got "
            f"{tuple(weight.shape)}; pass one weight for each column"
        )
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return RMSNormFunction.apply(x, weight, eps)
    y, _ = forward(x, weight, eps, save_rstd=False)
    return y


def apply(inputs: dict[str, torch.Tensor], **attributes: Any) -> dict[str, torch.Tensor]:
    """The block `rmsnorm`: x[rows, columns], weight[columns], eps -> y[rows, columns]."""
    return {"y": rmsnorm(inputs["x"], inputs["weight"], **attributes)}
