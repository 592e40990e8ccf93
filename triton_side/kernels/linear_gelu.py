"""A linear layer followed by GELU in its tanh form, forward and backward: y = gelu(pre), pre = x @ weight + bias.

    dpre = dy gelu'(pre)    dbias = sum over rows of dpre    dx = dpre weight^T    dweight = x^T dpre

Hendrycks and Gimpel, "Gaussian Error Linear Units", arXiv:1606.08415. The forward pass is one kernel with bias and GELU
in its epilogue. The backward pass is one pass over dy and pre, which writes dpre and each program's share of dbias; the
sum of the shares, unless a program sums all rows; and two products. There are no atomics, so results repeat bit for bit
on one GPU model.

With gradients, the forward pass saves x, weight and pre. In 16-bit dtypes, writing and reading pre moves 4 bytes an
element: 1.0 ps at the 4.1 TB/s of an H200. Recomputing it takes 2 k FLOPs: 10 ps for k = 4096 at the product's 800
TFLOP/s. Recomputing wins only for k under 400.

The epilogue costs time, because the tensor cores of the program's multiprocessor wait for it. An exponential and a
division an element take 4096 clocks of the special function units for a tile of 128 x 256. The tile's product of
k = 4096 takes 32,768 clocks of the tensor cores (CUDA C++ Programming Guide, throughput of arithmetic instructions).

Shapes: x [m, k], weight [k, n], bias [n]; pre, y [m, n]. dtypes: bfloat16, float16, float32, one for all. Products
accumulate in float32. The forward pass takes GELU of the float32 sum; the gradient is taken at the stored pre.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from xlafuse.triton_side.calls.declare import computing, declare
from xlafuse.triton_side.configs.tuned import tuned
from xlafuse.triton_side.kernels import gelu, linear
from xlafuse.triton_side.kernels.gelu import gelu_value_and_slope
from xlafuse.triton_side.kernels.linear import check_linear, input_gradient, weight_gradient
from xlafuse.triton_side.kernels.matmul import FEW_ROWS, choose_config, launch_bias_gelu, matmul_config
from xlafuse.triton_side.kernels.shared.column_sums import sum_columns
from xlafuse.triton_side.kernels.shared.launch import (
    cdiv,
    device_of,
    multiprocessors,
    next_power_of_2,
    with_unit_column_stride,
)
from xlafuse.triton_side.kernels.shared.row_reduction import load, tile_of_rows

FORWARD = (*linear.FORWARD, *gelu.FORWARD)


@dataclass(frozen=True)
class DpreConfig:
    """A program takes every `programs`-th tile of a column of tiles.

    block_rows, block_columns: the size of a tile, in powers of two.
    num_stages: above 1, that many tiles less one are prefetched into shared memory.
    """

    block_rows: int
    block_columns: int
    num_warps: int
    num_stages: int
    programs: int


@declare(*gelu.BACKWARD, *linear.PARTIAL_DBIAS, flops=lambda shapes: 18 * math.prod(shapes["pre_ptr"]))
@triton.jit
def dpre_kernel(
    dy_ptr, pre_ptr, dpre_ptr, partial_ptr, dy_row_stride, rows, columns,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):
    """Compute dpre and, for each program, the sum of its rows; one program's sum is dbias."""
    accurate: tl.constexpr = dpre_ptr.dtype.element_ty == tl.float32
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    dbias = tl.zeros([ROWS, COLUMNS], tl.float32)
    for tile in tl.range(tl.program_id(1), tl.cdiv(rows, ROWS), tl.num_programs(1), num_stages=STAGES):
        row, mask = tile_of_rows(tile, rows, column, columns, ROWS)
        dy = load(dy_ptr + row * dy_row_stride + column, mask)
        pre = load(pre_ptr + row * columns + column, mask)
        dpre = dy * gelu_value_and_slope(pre, accurate)[1]
        tl.store(dpre_ptr + row * columns + column, dpre.to(dpre_ptr.dtype.element_ty), mask=mask)
        dbias += dpre
    partial = tl.sum(dbias, axis=0, keep_dims=True)
    partial_ptr += tl.program_id(1).to(tl.int64) * columns
    tl.store(partial_ptr + column, partial.to(partial_ptr.dtype.element_ty), mask=column < columns)


@tuned
def configure_dpre(rows: int, columns: int, element_bytes: int, multiprocessors: int) -> DpreConfig:
    """Thirty-two elements a thread for four warps, with two prefetched tiles, as in RMSNorm's backward pass.

    Each program writes a row of fp32 partial sums that is read again. So there are only as many programs as run at once
    (128 KiB of prefetched tiles a multiprocessor), with at least two tiles each.

    One program sums few rows. Its tiles are narrower, so that each multiprocessor has a program: 16 rows of 16,384
    columns in 32 programs took 4.6 us, and 2.4 us to round the sum (CUPTI, one H200).
    """
    block_columns = min(512, next_power_of_2(max(1, columns)))
    if rows <= FEW_ROWS:
        block_columns = min(block_columns, max(64, next_power_of_2(cdiv(columns, multiprocessors))))
        return DpreConfig(2048 // block_columns, block_columns, num_warps=4, num_stages=3, programs=1)
    block_rows = 4096 // block_columns
    resident = max(1, 8 // element_bytes * multiprocessors // max(1, cdiv(columns, block_columns)))
    programs = min(cdiv(rows, 2 * block_rows), resident)
    return DpreConfig(block_rows, block_columns, num_warps=4, num_stages=3, programs=programs)


def launch_dpre(
    dy: torch.Tensor, pre: torch.Tensor, config: DpreConfig | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return dpre [m, n], contiguous, and dbias [n] from dy and a contiguous pre."""
    rows, columns = pre.shape
    dy = with_unit_column_stride(dy)
    config = config or configure_dpre(rows, columns, pre.element_size(), multiprocessors(pre.device))
    dpre = torch.empty_like(pre)
    alone = config.programs == 1
    partial = torch.empty((config.programs, columns), dtype=pre.dtype if alone else torch.float32, device=pre.device)
    of_all_rows = computing(*gelu.BACKWARD, *linear.DBIAS, partial_ptr="dbias") if alone else computing()
    with device_of(pre), of_all_rows:
        dpre_kernel[(cdiv(columns, config.block_columns), config.programs)](
            dy, pre, dpre, partial, dy.stride(0), rows, columns,
            ROWS=config.block_rows, COLUMNS=config.block_columns, STAGES=config.num_stages,
            num_warps=config.num_warps,
        )
    if alone:
        return dpre, partial[0]
    with computing(*linear.DBIAS, sum_ptr="dbias"):
        return dpre, sum_columns(partial, pre.dtype)


def _forward(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, save: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    config = choose_config(matmul_config, x, weight)
    with computing(*FORWARD, c_ptr="pre", gelu_ptr="y"):
        return launch_bias_gelu(x, weight, bias.contiguous(), config, save)


class _LinearGelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        y, pre = _forward(x, weight, bias, save=True)
        ctx.save_for_backward(x, weight, pre)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        x, weight, pre = ctx.saved_tensors
        dpre, dbias = launch_dpre(dy, pre)
        return input_gradient(dpre, weight), weight_gradient(dpre, x), dbias


def linear_gelu(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Return gelu(x @ weight + bias), GELU in its tanh form; arguments, result and errors are those of `linear`."""
    check_linear(x, weight, bias)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (x, weight, bias)):
        return _LinearGelu.apply(x, weight, bias)
    y, _ = _forward(x, weight, bias, save=False)
    return y


def apply(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Run the block `linear_gelu`: x [m, k], weight [k, n], bias [n] -> y [m, n]."""
    return {"y": linear_gelu(**inputs)}
