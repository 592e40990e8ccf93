"""Softmax over the columns of a matrix, forward and backward.

    y = exp(x - max(x)) / sum(exp(x - max(x)))        dx = y * (dy - sum(y * dy))

Shapes: x, y, dy, dx [rows, columns]. bfloat16, float16 or float32 in and out; fp32 inside. The backward pass
reads the stored y, which is all that the forward pass saves.

A row is read once and held in registers. Rows too long for that are walked twice: the forward pass takes
maximum and sum together (Milakov and Gimelshein, "Online normalizer calculation for softmax", arXiv:1805.02867),
then writes y; the second reading mostly hits L2, since only the rows of the resident programs are in use.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from triton_side.kernels._launch import (
    RowConfig,
    check_matrix,
    check_tensors,
    device_of,
    multiprocessors,
    with_unit_column_stride,
)

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def softmax_forward_kernel(
    x_ptr, y_ptr, x_row_stride, rows, columns,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, COLUMNS)[None, :]
    for tile in tl.range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        row = (tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        mask = (row < rows) & (column < columns)
        x = tl.load(x_ptr + row * x_row_stride + column, mask=mask, other=-float("inf")).to(tl.float32)
        # Subtracting before scaling keeps the exponent exact to half an ulp for any magnitude of x.
        numerator = tl.exp2((x - tl.max(x, axis=1, keep_dims=True)) * LOG2_E)
        y = numerator * tl.div_rn(1.0, tl.sum(numerator, axis=1, keep_dims=True))
        tl.store(y_ptr + row * columns + column, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def softmax_forward_looped_kernel(
    x_ptr, y_ptr, x_row_stride, rows, columns,
    COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    for row in tl.range(tl.program_id(0), rows, tl.num_programs(0)):
        x_row_ptr = x_ptr + tl.cast(row, tl.int64) * x_row_stride
        y_row_ptr = y_ptr + tl.cast(row, tl.int64) * columns
        maximum = tl.full([1], -float("inf"), tl.float32)
        partial_sum = tl.zeros([COLUMNS], tl.float32)
        for start in tl.range(0, columns, COLUMNS, num_stages=STAGES):
            column = start + tl.arange(0, COLUMNS)
            x = tl.load(x_row_ptr + column, mask=column < columns, other=-float("inf")).to(tl.float32)
            new_maximum = tl.maximum(maximum, tl.max(x, axis=0, keep_dims=True))
            # While all is -inf, any finite reference keeps the sum at zero; -inf - -inf would make it NaN.
            reference = tl.where(new_maximum == -float("inf"), 0.0, new_maximum)
            partial_sum *= tl.exp2((maximum - reference) * LOG2_E)
            partial_sum += tl.exp2((x - reference) * LOG2_E)
            maximum = new_maximum
        scale = tl.div_rn(1.0, tl.sum(partial_sum, axis=0, keep_dims=True))
        for start in tl.range(0, columns, COLUMNS, num_stages=STAGES):
            column = start + tl.arange(0, COLUMNS)
            x = tl.load(x_row_ptr + column, mask=column < columns, other=-float("inf")).to(tl.float32)
            y = tl.exp2((x - maximum) * LOG2_E) * scale
            tl.store(y_row_ptr + column, y.to(y_ptr.dtype.element_ty), mask=column < columns)


@triton.jit
def softmax_backward_kernel(
    y_ptr, dy_ptr, dx_ptr, y_row_stride, dy_row_stride, rows, columns,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, COLUMNS)[None, :]
    for tile in tl.range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        row = (tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        mask = (row < rows) & (column < columns)
        y = tl.load(y_ptr + row * y_row_stride + column, mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + row * dy_row_stride + column, mask=mask, other=0.0).to(tl.float32)
        dx = y * (dy - tl.sum(y * dy, axis=1, keep_dims=True))
        tl.store(dx_ptr + row * columns + column, dx.to(dx_ptr.dtype.element_ty), mask=mask)


@triton.jit
def softmax_backward_looped_kernel(
    y_ptr, dy_ptr, dx_ptr, y_row_stride, dy_row_stride, rows, columns,
    COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    for row in tl.range(tl.program_id(0), rows, tl.num_programs(0)):
        y_row_ptr = y_ptr + tl.cast(row, tl.int64) * y_row_stride
        dy_row_ptr = dy_ptr + tl.cast(row, tl.int64) * dy_row_stride
        dx_row_ptr = dx_ptr + tl.cast(row, tl.int64) * columns
        partial_dot = tl.zeros([COLUMNS], tl.float32)
        for start in tl.range(0, columns, COLUMNS, num_stages=STAGES):
            column = start + tl.arange(0, COLUMNS)
            y = tl.load(y_row_ptr + column, mask=column < columns, other=0.0).to(tl.float32)
            dy = tl.load(dy_row_ptr + column, mask=column < columns, other=0.0).to(tl.float32)
            partial_dot += y * dy
        dot = tl.sum(partial_dot, axis=0, keep_dims=True)
        for start in tl.range(0, columns, COLUMNS, num_stages=STAGES):
            column = start + tl.arange(0, COLUMNS)
            y = tl.load(y_row_ptr + column, mask=column < columns, other=0.0).to(tl.float32)
            dy = tl.load(dy_row_ptr + column, mask=column < columns, other=0.0).to(tl.float32)
            tl.store(dx_row_ptr + column, (y * (dy - dot)).to(dx_ptr.dtype.element_ty), mask=column < columns)


def configure_forward(rows: int, columns: int, element_bytes: int, multiprocessors: int) -> RowConfig:
    """Sixteen elements to a thread, one row to a program; long rows persistent with the next row on its way.

    A row of 32,768 columns takes 1024 threads and all registers of a multiprocessor (63 to a thread, no
    spills), so nothing else runs there that would hide its loads: prefetching into shared memory does. At
    65,536 columns the registers spill, and the looped kernel takes over.
    """
    block = triton.next_power_of_2(columns)
    if block > 32768:
        return RowConfig(1, 8192, 16, 3, min(rows, multiprocessors))
    if block > 8192:
        stages = 3 if block * element_bytes <= 65536 else 2
        return RowConfig(1, block, 32, stages, min(rows, multiprocessors))
    block_rows = max(1, 1024 // block)
    num_warps = max(1, min(32, block * block_rows // 512))
    return RowConfig(block_rows, block, num_warps, 1, triton.cdiv(rows, block_rows))


def configure_backward(rows: int, columns: int, element_bytes: int, multiprocessors: int) -> RowConfig:
    """As in the forward pass, but two rows are held at once, so that 32,768 columns spill already."""
    block = triton.next_power_of_2(columns)
    if block > 16384:
        return RowConfig(1, 8192, 32, 2, min(rows, multiprocessors))
    if block > 8192:
        return RowConfig(1, block, 32, 2, min(rows, multiprocessors))
    block_rows = max(1, 1024 // block)
    num_warps = max(1, min(32, block * block_rows // 512))
    return RowConfig(block_rows, block, num_warps, 1, triton.cdiv(rows, block_rows))


def forward(x: torch.Tensor, config: RowConfig | None = None) -> torch.Tensor:
    """Launch the forward kernel on x [rows, columns]; y is contiguous, in x's dtype."""
    rows, columns = x.shape
    y = torch.empty((rows, columns), dtype=x.dtype, device=x.device)
    if y.numel() == 0:
        return y
    x = with_unit_column_stride(x)
    config = config or configure_forward(rows, columns, x.element_size(), multiprocessors(x.device))
    with device_of(x):
        if config.block_columns < columns:
            softmax_forward_looped_kernel[(config.programs,)](
                x, y, x.stride(0), rows, columns,
                COLUMNS=config.block_columns, STAGES=config.num_stages, num_warps=config.num_warps,
            )  # fmt: skip
        else:
            softmax_forward_kernel[(config.programs,)](
                x, y, x.stride(0), rows, columns,
                ROWS=config.block_rows, COLUMNS=config.block_columns, STAGES=config.num_stages,
                num_warps=config.num_warps,
            )  # fmt: skip
    return y


def backward(y: torch.Tensor, dy: torch.Tensor, config: RowConfig | None = None) -> torch.Tensor:
    """Launch the backward kernel on y, dy [rows, columns]; dx is contiguous, in y's dtype."""
    rows, columns = y.shape
    dx = torch.empty((rows, columns), dtype=y.dtype, device=y.device)
    if dx.numel() == 0:
        return dx
    y, dy = with_unit_column_stride(y), with_unit_column_stride(dy)
    config = config or configure_backward(rows, columns, y.element_size(), multiprocessors(y.device))
    with device_of(y):
        if config.block_columns < columns:
            softmax_backward_looped_kernel[(config.programs,)](
                y, dy, dx, y.stride(0), dy.stride(0), rows, columns,
                COLUMNS=config.block_columns, STAGES=config.num_stages, num_warps=config.num_warps,
            )  # fmt: skip
        else:
            softmax_backward_kernel[(config.programs,)](
                y, dy, dx, y.stride(0), dy.stride(0), rows, columns,
                ROWS=config.block_rows, COLUMNS=config.block_columns, STAGES=config.num_stages,
                num_warps=config.num_warps,
            )  # fmt: skip
    return dx


class SoftmaxFunction(torch.autograd.Function):
    """Saves y; the backward pass reads y and dy once and writes dx."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y = forward(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
        (y,) = ctx.saved_tensors
        return backward(y, dy)


def softmax(x: torch.Tensor) -> torch.Tensor:
    """Softmax over the columns of x, differentiable once.

    Args:
        x: [rows, columns], bfloat16, float16 or float32, on a GPU. Rows may be any distance apart; a matrix
            whose columns are not neighbours in memory is copied.

    Returns:
        A new contiguous [rows, columns] tensor of x's dtype. A row of -inf alone is NaN, as in torch.softmax.

    Raises:
        ValueError: x is not [rows, columns], or not on a GPU.
        TypeError: x has another dtype.
    """
    check_tensors(x=x)
    check_matrix("x", x)
    return SoftmaxFunction.apply(x)


def apply(inputs: dict[str, torch.Tensor], **attributes: Any) -> dict[str, torch.Tensor]:
    """The block `softmax`: x[rows, columns] -> y[rows, columns]."""
    return {"y": softmax(inputs["x"], **attributes)}
