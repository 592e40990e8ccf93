"""Bias and GELU between the two products of an MLP, forward and backward.

    y  = gelu(z),  z = x + bias
    dx = dy gelu'(z)          dbias = sum over rows of dx

GELU has its tanh form, as in `gelu.py`. Shapes: x, y, dy, dx [rows, columns], bias, dbias [columns]. bfloat16, float16
or float32 in and out; fp32 inside, rounded once at the end. The forward pass saves x and bias.

A program of the backward kernel takes tiles of rows of the same columns. It adds its share of dbias in registers and
writes it once; a second kernel adds the programs' shares.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from xlafuse.triton_side.calls import declare
from xlafuse.triton_side.configs.tuned import tuned
from xlafuse.triton_side.kernels import gelu
from xlafuse.triton_side.kernels.gelu import gelu_value, gelu_value_and_slope
from xlafuse.triton_side.kernels.shared.column_sums import sum_columns
from xlafuse.triton_side.kernels.shared.launch import (
    cdiv,
    check_matrix,
    check_tensors,
    check_vector,
    device_of,
    multiprocessors,
    next_power_of_2,
    with_unit_column_stride,
)
from xlafuse.triton_side.kernels.shared.row_reduction import load, tile_of_rows

# Operations in the block's stages; of dbias before and after the sum over programs.
FORWARD = (declare.forward("add", "bias"), *gelu.FORWARD)
BACKWARD = (declare.again("add", "bias"), *gelu.BACKWARD, declare.gradient("reduce_sum", "bias", "partial"))
DBIAS = declare.gradient("reduce_sum", "bias", "dbias")


@dataclass(frozen=True)
class TileConfig:
    """A program takes every `programs`-th tile of a column of tiles.

    block_rows, block_columns: the size of a tile, in powers of two.
    """

    block_rows: int
    block_columns: int
    num_warps: int
    programs: int


@triton.jit
def _tile_columns(columns, COLUMNS: tl.constexpr):
    """Return the columns of this program's tiles, its number among the programs for them, and how many these are.

    Neighbouring programs take neighbouring columns. The grid has one axis, because the others end at 65,535.
    """
    tiles = tl.cdiv(columns, COLUMNS)
    column = tl.program_id(0) % tiles * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    return column, tl.program_id(0) // tiles, tl.num_programs(0) // tiles


@declare.declare(*FORWARD, flops=lambda shapes: 10 * math.prod(shapes["x_ptr"]))
@triton.jit
def bias_gelu_forward_kernel(
    x_ptr, bias_ptr, y_ptr, x_row_stride, rows, columns,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):
    accurate: tl.constexpr = y_ptr.dtype.element_ty == tl.float32
    column, first, programs = _tile_columns(columns, COLUMNS)
    bias = load(bias_ptr + column, column < columns)
    for tile in tl.range(first, tl.cdiv(rows, ROWS), programs):
        row, mask = tile_of_rows(tile, rows, column, columns, ROWS)
        x = load(x_ptr + row * x_row_stride + column, mask)
        y = gelu_value(x + bias, accurate)
        tl.store(y_ptr + row * columns + column, y.to(y_ptr.dtype.element_ty), mask=mask)


@declare.declare(*BACKWARD, flops=lambda shapes: 19 * math.prod(shapes["x_ptr"]))
@triton.jit
def bias_gelu_backward_kernel(
    x_ptr, bias_ptr, dy_ptr, dx_ptr, partial_ptr, x_row_stride, dy_row_stride, rows, columns,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):
    accurate: tl.constexpr = dx_ptr.dtype.element_ty == tl.float32
    column, first, programs = _tile_columns(columns, COLUMNS)
    bias = load(bias_ptr + column, column < columns)
    dbias = tl.zeros([ROWS, COLUMNS], tl.float32)
    for tile in tl.range(first, tl.cdiv(rows, ROWS), programs):
        row, mask = tile_of_rows(tile, rows, column, columns, ROWS)
        x = load(x_ptr + row * x_row_stride + column, mask)
        dy = load(dy_ptr + row * dy_row_stride + column, mask)
        dx = dy * gelu_value_and_slope(x + bias, accurate)[1]
        tl.store(dx_ptr + row * columns + column, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        # Past the last row dx is 0 times the derivative at the bias, which is NaN for a huge bias.
        dbias += tl.where(row < rows, dx, 0.0)
    partial = tl.sum(dbias, axis=0, keep_dims=True)
    tl.store(partial_ptr + first.to(tl.int64) * columns + column, partial, mask=column < columns)


@tuned
def configure_forward(rows: int, columns: int, element_bytes: int) -> TileConfig:
    """Four warps and two 16-byte loads a thread, one tile a program; as wide as 16-byte loads of a row allow.

    Each tile reads the bias from L2. With two rows a tile that is half as many bytes as come from memory, not as many.
    """
    block_columns = min(128 * 16 // element_bytes, next_power_of_2(columns))
    block_rows = 2 * 128 * 16 // element_bytes // block_columns
    return TileConfig(block_rows, block_columns, 4, cdiv(rows, block_rows))


@tuned
def configure_backward(rows: int, columns: int, element_bytes: int, multiprocessors: int) -> TileConfig:
    """Tiles as in the forward pass; eight programs a multiprocessor, or one for each tile if that is fewer.

    Eight programs of four warps have 64 registers a thread and 64 KiB of x and dy in flight. Each program writes a row
    of fp32 partial sums that is read again: at 8192 x 16,384 of bfloat16 66 rows, 1.1% of the bytes of the three
    matrices.
    """
    tile = configure_forward.__wrapped__(rows, columns, element_bytes)
    resident = max(1, 8 * multiprocessors // cdiv(columns, tile.block_columns))
    return TileConfig(tile.block_rows, tile.block_columns, tile.num_warps, min(tile.programs, resident))


def forward(x: torch.Tensor, bias: torch.Tensor, config: TileConfig | None = None) -> torch.Tensor:
    """Launch the forward kernel; return y [rows, columns], contiguous, in x's dtype."""
    rows, columns = x.shape
    y = torch.empty((rows, columns), dtype=x.dtype, device=x.device)
    if y.numel() == 0:
        return y
    x, bias = with_unit_column_stride(x), bias.contiguous()
    config = config or configure_forward(rows, columns, x.element_size())
    with device_of(x):
        bias_gelu_forward_kernel[(config.programs * cdiv(columns, config.block_columns),)](
            x, bias, y, x.stride(0), rows, columns,
            ROWS=config.block_rows, COLUMNS=config.block_columns, num_warps=config.num_warps,
        )
    return y


def backward(
    x: torch.Tensor, bias: torch.Tensor, dy: torch.Tensor, config: TileConfig | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the backward kernels; return dx [rows, columns], contiguous, and dbias [columns], in x's dtype."""
    rows, columns = x.shape
    dx = torch.empty((rows, columns), dtype=x.dtype, device=x.device)
    if dx.numel() == 0:
        return dx, torch.zeros(columns, dtype=x.dtype, device=x.device)
    x, dy, bias = with_unit_column_stride(x), with_unit_column_stride(dy), bias.contiguous()
    config = config or configure_backward(rows, columns, x.element_size(), multiprocessors(x.device))
    partial = torch.empty((config.programs, columns), dtype=torch.float32, device=x.device)
    with device_of(x):
        bias_gelu_backward_kernel[(config.programs * cdiv(columns, config.block_columns),)](
            x, bias, dy, dx, partial, x.stride(0), dy.stride(0), rows, columns,
            ROWS=config.block_rows, COLUMNS=config.block_columns, num_warps=config.num_warps,
        )
    with declare.computing(DBIAS, sum_ptr="dbias"):
        return dx, sum_columns(partial, x.dtype)


class BiasGeluFunction(torch.autograd.Function):
    """Save x and bias. The backward pass reads x and dy once and writes dx and dbias."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, bias)
        return forward(x, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, bias = ctx.saved_tensors
        return backward(x, bias, dy)


def bias_gelu(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Return gelu(x + bias), tanh form, differentiable once in x and bias.

    Args:
        x: [rows, columns], bfloat16, float16 or float32, on a GPU. Rows may be any distance apart; a matrix
            whose last stride is not 1 is copied.
        bias: [columns], of x's dtype and device.

    Returns:
        A new contiguous [rows, columns] tensor of x's dtype.

    Raises:
        ValueError: the shapes or devices do not fit, or the tensors are not on a GPU.
        TypeError: dtypes differ or are not supported.
    """
    check_tensors(x=x, bias=bias)
    check_matrix("x", x)
    check_vector("bias", bias, x)
    return BiasGeluFunction.apply(x, bias)


def apply(inputs: dict[str, torch.Tensor], **attributes: Any) -> dict[str, torch.Tensor]:
    """Run the block `bias_gelu`: x[rows, columns], bias[columns] -> y[rows, columns]."""
    return {"y": bias_gelu(inputs["x"], inputs["bias"], **attributes)}
