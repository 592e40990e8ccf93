"""Root-mean-square normalisation over the columns of a matrix, forward and backward.

    rstd = 1 / sqrt(mean(x^2) + eps)       y  = n w,  n = x rstd
    dx = rstd (g - n mean(g n)),  g = dy w      dw = sum over rows of dy n

Zhang and Sennrich, "Root Mean Square Layer Normalization", arXiv:1910.07467. Shapes: x, y, dy, dx [rows, columns],
weight, dweight [columns], rstd [rows] in fp32, saved only if a gradient is wanted. bfloat16, float16 or float32 in and
out; fp32 inside, rounded once at the end.

In a layer with residuals, x is a sum that other operations also read. `forward_with_residual` computes the sum and its
norm in one pass and stores both. The norm is of the stored sum, which the backward pass reads. The backward pass adds
`dsum`, the other readers' gradient, to dx.

The backward kernel is a persistent grid. Each program adds its rows' share of dweight in registers and writes it once;
a second kernel adds the programs' shares (shared/column_sums.py). Rows too long for its registers are read twice, and a
third reading computes dweight.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from xlafuse.triton_side.calls import declare
from xlafuse.triton_side.configs.tuned import tuned
from xlafuse.triton_side.kernels.shared.column_sums import sum_columns
from xlafuse.triton_side.kernels.shared.launch import (
    RowConfig,
    cdiv,
    check_matrix,
    check_tensors,
    check_vector,
    device_of,
    multiprocessors,
    next_power_of_2,
    rows_per_tile,
    with_unit_column_stride,
)
from xlafuse.triton_side.kernels.shared.row_reduction import (
    NormKernels,
    launch_norm_backward,
    load,
    norm_backward,
    norm_backward_looped,
    norm_shares,
    store_partials,
    tile_of_rows,
)

# Operations in the block's stages: of the forward pass, of dx, and of dweight before and after the sum over programs.
# The backward pass recomputes the normalised rows; rstd is saved, so it repeats no sum.
FORWARD = (
    declare.forward("mul", "mean_square"), declare.forward("reduce_sum", "mean_square"),
    declare.forward("rsqrt", "normalize"), declare.forward("mul", "normalize"), declare.forward("mul", "weight"),
)
NORMALIZED_AGAIN = declare.again("mul", "normalize")
DX = (
    declare.gradient("mul", "weight", "dnormalised"), declare.gradient("reduce_sum", "normalize", "projection"),
    declare.gradient("mul", "normalize", "dx"), declare.gradient("mul", "mean_square", "dx"),
)
PARTIAL_DWEIGHT = (
    declare.gradient("mul", "weight", "dweight"), declare.gradient("reduce_sum", "weight", "partial"),
)
DWEIGHT = declare.gradient("reduce_sum", "weight", "dweight")


def _forward_flops(shapes: declare.Shapes) -> float:
    return (4 + ("residual_ptr" in shapes)) * math.prod(shapes["x_ptr"])


def _backward_flops(shapes: declare.Shapes) -> float:
    return (9 + ("dsum_ptr" in shapes)) * math.prod(shapes["x_ptr"])


@triton.jit
def _load_sum(x_ptr, residual_ptr, residual_offset, mask, EVICTION: tl.constexpr):
    """Return x + residual, rounded to x's dtype, in fp32; x alone if residual_ptr is None.

    EVICTION: Triton's eviction_policy of both, or "".
    """
    x = tl.load(x_ptr, mask=mask, other=0.0, eviction_policy=EVICTION)
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + residual_offset, mask=mask, other=0.0, eviction_policy=EVICTION)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
    return x.to(tl.float32)


@declare.declare(*FORWARD, flops=_forward_flops)
@triton.jit
def rmsnorm_forward_kernel(
    x_ptr, residual_ptr, weight_ptr, y_ptr, sum_ptr, rstd_ptr, x_row_stride, residual_row_stride, rows, columns, eps,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):
    column = tl.arange(0, COLUMNS)[None, :]
    weight = tl.load(weight_ptr + column, mask=column < columns, other=0.0)
    for tile in tl.range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        row, mask = tile_of_rows(tile, rows, column, columns, ROWS)
        residual_offset = row * residual_row_stride + column
        x = _load_sum(x_ptr + row * x_row_stride + column, residual_ptr, residual_offset, mask, "")
        if sum_ptr is not None:
            tl.store(sum_ptr + row * columns + column, x.to(sum_ptr.dtype.element_ty), mask=mask)
        rstd = tl.rsqrt(tl.sum(x * x, axis=1, keep_dims=True) / columns + eps)
        y = x * rstd * weight.to(tl.float32)
        tl.store(y_ptr + row * columns + column, y.to(y_ptr.dtype.element_ty), mask=mask)
        if rstd_ptr is not None:
            tl.store(rstd_ptr + row, rstd, mask=row < rows)


@declare.declare(*FORWARD, flops=_forward_flops)
@triton.jit
def rmsnorm_forward_looped_kernel(
    x_ptr, residual_ptr, weight_ptr, y_ptr, sum_ptr, rstd_ptr, x_row_stride, residual_row_stride, rows, columns, eps,
    COLUMNS: tl.constexpr, STAGES: tl.constexpr, UNROLLED: tl.constexpr,
):
    """Read each row twice.

    UNROLLED: the number of columns where the compiler shall unroll the loops, else None. Caches then get hints to keep
    x until its second reading.
    """
    FIRST: tl.constexpr = "" if UNROLLED is None else "evict_last"
    SECOND: tl.constexpr = "" if UNROLLED is None else "evict_first"
    if UNROLLED is not None:
        columns = UNROLLED
    for row in tl.range(tl.program_id(0), rows, tl.num_programs(0)):
        x_row_ptr = x_ptr + tl.cast(row, tl.int64) * x_row_stride
        residual_row = tl.cast(row, tl.int64) * residual_row_stride
        out_row = tl.cast(row, tl.int64) * columns
        squares = tl.zeros([COLUMNS], tl.float32)
        for start in tl.range(0, columns, COLUMNS, num_stages=STAGES):
            column = start + tl.arange(0, COLUMNS)
            x = _load_sum(x_row_ptr + column, residual_ptr, residual_row + column, column < columns, FIRST)
            squares += x * x
        rstd = tl.rsqrt(tl.sum(squares, axis=0) / columns + eps)
        if rstd_ptr is not None:
            tl.store(rstd_ptr + row, rstd)
        for start in tl.range(0, columns, COLUMNS, num_stages=STAGES):
            column = start + tl.arange(0, COLUMNS)
            x = _load_sum(x_row_ptr + column, residual_ptr, residual_row + column, column < columns, SECOND)
            if sum_ptr is not None:
                tl.store(sum_ptr + out_row + column, x.to(sum_ptr.dtype.element_ty), mask=column < columns)
            weight = load(weight_ptr + column, column < columns)
            y = x * rstd * weight
            tl.store(y_ptr + out_row + column, y.to(y_ptr.dtype.element_ty), mask=column < columns)


@declare.declare(NORMALIZED_AGAIN, *DX, *PARTIAL_DWEIGHT, flops=_backward_flops)
@triton.jit
def rmsnorm_backward_kernel(
    x_ptr, weight_ptr, rstd_ptr, dy_ptr, dsum_ptr, dx_ptr, partial_ptr, x_row_stride, dy_row_stride, dsum_row_stride,
    rows, columns,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):
    column = tl.arange(0, COLUMNS)[None, :]
    shares = norm_backward(
        x_ptr, weight_ptr, None, rstd_ptr, dy_ptr, dsum_ptr, dx_ptr, x_row_stride, dy_row_stride, dsum_row_stride,
        column, rows, columns, ROWS, COLUMNS, STAGES,
    )
    partial = tl.sum(shares[0], axis=0, keep_dims=True)
    tl.store(partial_ptr + tl.program_id(0) * columns + column, partial, mask=column < columns)


@declare.declare(NORMALIZED_AGAIN, *DX, flops=_backward_flops)
@triton.jit
def rmsnorm_backward_looped_kernel(
    x_ptr, weight_ptr, rstd_ptr, dy_ptr, dsum_ptr, dx_ptr, x_row_stride, dy_row_stride, dsum_row_stride, rows, columns,
    COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):
    norm_backward_looped(
        x_ptr, weight_ptr, None, rstd_ptr, dy_ptr, dsum_ptr, dx_ptr, x_row_stride, dy_row_stride, dsum_row_stride,
        rows, columns, COLUMNS, STAGES,
    )


@declare.declare(NORMALIZED_AGAIN, *PARTIAL_DWEIGHT, flops=lambda shapes: 3 * math.prod(shapes["x_ptr"]))
@triton.jit
def rmsnorm_partial_dweight_kernel(
    x_ptr, rstd_ptr, dy_ptr, partial_ptr, x_row_stride, dy_row_stride, rows, columns,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    shares = norm_shares(
        x_ptr, None, rstd_ptr, dy_ptr, x_row_stride, dy_row_stride, column, rows, columns, ROWS, COLUMNS
    )
    store_partials(partial_ptr, shares, column, columns, tl.program_id(0).to(tl.int64))


BACKWARD_KERNELS = NormKernels(
    rmsnorm_backward_kernel, rmsnorm_backward_looped_kernel, rmsnorm_partial_dweight_kernel
)


@tuned
def configure_forward(rows: int, columns: int, element_bytes: int, multiprocessors: int) -> RowConfig:
    """Return rows in registers, persistent for long rows; looped for the longest, and for many of 8192 columns.

    bfloat16 on an H200, in GB/s (a copy reaches 4153 at 4096 columns):

        4096 columns    4119 with 4 warps, 3975 with 8, 3865 with 4 and a prefetch
        8192 columns    3990 with 8 warps, 3292 with 16, 3862 with 8 and a prefetch

    By CUPTI 8192 rows of 8192 columns take 64.5 us in registers with 8 warps and 61.0 looped with 16: 4161 and 4401
    GB/s. If the loops are not unrolled, they take 76.2 (docs/kernels/rows.md). With a residual this was not timed.
    float32 stays in registers.

    At 16,384 columns one program fills a multiprocessor (102 registers a thread), and only a prefetch hides its loads.
    """
    block = next_power_of_2(columns)
    if block > 16384:
        return RowConfig(1, 8192, 32, 1, min(rows, multiprocessors))
    if block > 8192:
        stages = 3 if element_bytes == 2 else 2
        return RowConfig(1, block, 16, stages, min(rows, multiprocessors))
    if columns == 8192 and element_bytes == 2 and rows >= 4 * multiprocessors:
        return RowConfig(1, 4096, 16, 1, rows)
    return rows_in_registers(rows, columns, multiprocessors)


def rows_in_registers(rows: int, columns: int, multiprocessors: int) -> RowConfig:
    """Return tiles of thirty-two elements a thread, which have four 16-byte loads in flight."""
    block = next_power_of_2(columns)
    block_rows = rows_per_tile(rows, block, multiprocessors)
    num_warps = max(1, block * block_rows // 1024)
    return RowConfig(block_rows, block, num_warps, 1, cdiv(rows, block_rows))


@tuned
def configure_backward(rows: int, columns: int, element_bytes: int, multiprocessors: int) -> RowConfig:
    """One resident set of programs; each holds x, dy, the weight and its share of dweight in registers.

    There are few programs, because each writes a row of fp32 partial sums that is read again. Each prefetches two
    tiles: bfloat16 on an H200 reaches 3946 GB/s at 4096 columns and 3954 at 8192, with one prefetched tile 3214 and
    2749. At 16,384 columns 44 of the 128 registers a thread spill, and two prefetched fp32 tiles exceed shared memory.
    """
    block = next_power_of_2(columns)
    if block > 16384:
        return RowConfig(1, 8192, 32, 1, min(rows, multiprocessors))
    block_rows = rows_per_tile(rows, block, multiprocessors)
    tile = block * block_rows
    stages = 3 if tile * element_bytes <= 32768 else 2
    resident = multiprocessors * max(1, min(16, 8192 // tile))
    return RowConfig(block_rows, block, max(1, tile // 1024), stages, min(cdiv(rows, block_rows), resident))


def forward(
    x: torch.Tensor, weight: torch.Tensor, eps: float, *, save_rstd: bool, config: RowConfig | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Launch the kernel; return a contiguous y [rows, columns] in x's dtype, and rstd [rows] in fp32 or None."""
    y, rstd = torch.empty(x.shape, dtype=x.dtype, device=x.device), _empty_rstd(x) if save_rstd else None
    _launch_forward(x, None, weight, y, None, rstd, eps, config)
    return y, rstd


def forward_with_residual(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, *, save_rstd: bool,
    config: RowConfig | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Launch the forward kernel on x + residual, two matrices of one shape; return y, the sum, and rstd or None.

    y and the sum are contiguous, in x's dtype.
    """
    y, total = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    rstd = _empty_rstd(x) if save_rstd else None
    _launch_forward(x, residual, weight, y, total, rstd, eps, config)
    return y, total, rstd


def _empty_rstd(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(x.shape[0], dtype=torch.float32, device=x.device)


def _launch_forward(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, y: torch.Tensor, total: torch.Tensor | None,
    rstd: torch.Tensor | None, eps: float, config: RowConfig | None,
) -> None:
    rows, columns = x.shape
    if y.numel() == 0:
        return
    x = with_unit_column_stride(x)
    residual = None if residual is None else with_unit_column_stride(residual)
    weight = weight.contiguous()
    config = config or configure_forward(rows, columns, x.element_size(), multiprocessors(x.device))
    tensors = (x, residual, weight, y, total, rstd, x.stride(0), 0 if residual is None else residual.stride(0))
    with device_of(x):
        if config.block_columns < columns:
            rmsnorm_forward_looped_kernel[(config.programs,)](
                *tensors, rows, columns, eps,
                UNROLLED=columns if columns == 2 * config.block_columns else None, **config.looped,
            )
        else:
            rmsnorm_forward_kernel[(config.programs,)](*tensors, rows, columns, eps, **config.whole_rows)


def backward(
    x: torch.Tensor, weight: torch.Tensor, rstd: torch.Tensor, dy: torch.Tensor, config: RowConfig | None = None, *,
    dsum: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the backward kernels; return dx [rows, columns], contiguous, and dweight [columns], in x's dtype.

    dsum: the gradient of x from its other readers, of x's shape. It is added to dx.
    """
    rows, columns = x.shape
    dx = torch.empty((rows, columns), dtype=x.dtype, device=x.device)
    if dx.numel() == 0:
        return dx, torch.zeros(columns, dtype=x.dtype, device=x.device)
    config = config or configure_backward(rows, columns, x.element_size(), multiprocessors(x.device))
    partial = torch.empty((config.programs, columns), dtype=torch.float32, device=x.device)
    launch_norm_backward(BACKWARD_KERNELS, x, weight, (rstd,), dy, dsum, dx, partial, config)
    with declare.computing(DWEIGHT, sum_ptr="dweight"):
        dweight = sum_columns(partial, x.dtype)
    return dx, dweight


class RMSNormFunction(torch.autograd.Function):
    """Save x, weight and rstd. The backward pass reads x and dy once and writes dx and dweight."""

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
    """Return x / sqrt(mean(x^2) + eps) * weight over the columns of x, differentiable once in x and weight.

    Args:
        x: [rows, columns], bfloat16, float16 or float32, on a GPU. Rows may be any distance apart; a matrix
            whose last stride is not 1 is copied.
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
    check_vector("weight", weight, x)
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return RMSNormFunction.apply(x, weight, eps)
    y, _ = forward(x, weight, eps, save_rstd=False)
    return y


def apply(inputs: dict[str, torch.Tensor], **attributes: Any) -> dict[str, torch.Tensor]:
    """Run the block `rmsnorm`: x[rows, columns], weight[columns], eps -> y[rows, columns]."""
    return {"y": rmsnorm(inputs["x"], inputs["weight"], **attributes)}
