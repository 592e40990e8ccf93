"""Layer normalisation over the columns of a matrix, forward and backward.

    rstd = 1 / sqrt(mean((x - mean(x))^2) + eps)        y = n w + b,  n = (x - mean(x)) rstd

    dx = rstd (g - mean(g) - n mean(g n)),  g = dy w    dw = sum over rows of dy n    db = sum over rows of dy

Ba, Kiros and Hinton, "Layer Normalization", arXiv:1607.06450. Shapes: x, y, dy, dx [rows, columns], weight, bias,
dweight, dbias [columns]; mean, rstd [rows] in fp32, saved only if a gradient is wanted. bfloat16, float16 or float32 in
and out; fp32 inside, rounded once at the end.

The variance is the mean square of x minus its mean, never mean(x^2) - mean(x)^2. The difference loses the digits that
both terms share: all of them if the mean is 4000 standard deviations.

The backward pass reads mean and rstd, 8 bytes a row, instead of computing two more sums. Like RMSNorm's it is a
persistent grid: each program adds its rows' shares of dweight and dbias in registers and writes them once, and a second
kernel adds the programs' shares. Rows too long for one program's registers are shared by two programs: each reads the
row, one half of it from L2, and has dx, dweight and dbias of its own half. Rows too long for that are read twice, and a
third reading computes dweight and dbias.
"""

import math
from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from xlafuse.triton_side.calls import declare
from xlafuse.triton_side.configs.tuned import tuned
from xlafuse.triton_side.kernels.rmsnorm import configure_forward as configure_rmsnorm
from xlafuse.triton_side.kernels.rmsnorm import rows_in_registers
from xlafuse.triton_side.kernels.shared.column_sums import sum_vectors
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
    normalise,
    store_partials,
)

# Operations in the block's stages: of the forward pass, of dx, and of the gradients of weight and bias before and after
# the sum over programs.
FORWARD = (
    declare.forward("reduce_sum", "mean"), declare.forward("sub", "variance"), declare.forward("mul", "variance"),
    declare.forward("reduce_sum", "variance"), declare.forward("rsqrt", "normalize"),
    declare.forward("mul", "normalize"), declare.forward("mul", "weight"), declare.forward("add", "bias"),
)
NORMALIZED_AGAIN = (declare.again("sub", "variance"), declare.again("mul", "normalize"))
DX = (
    declare.gradient("mul", "weight", "dnormalised"), declare.gradient("reduce_sum", "normalize", "projection"),
    declare.gradient("mul", "normalize", "dx"), declare.gradient("mul", "variance", "dx"),
    declare.gradient("reduce_sum", "variance", "dmean"), declare.gradient("sub", "mean", "dx"),
)
PARTIALS = (
    declare.gradient("mul", "weight", "dweight"), declare.gradient("reduce_sum", "weight", "partial"),
    declare.gradient("reduce_sum", "bias", "partial"),
)
SUMS = (declare.gradient("reduce_sum", "weight", "dweight"), declare.gradient("reduce_sum", "bias", "dbias"))


@declare.declare(*FORWARD, flops=lambda shapes: 7 * math.prod(shapes["x_ptr"]))
@triton.jit
def layernorm_forward_kernel(
    x_ptr, weight_ptr, bias_ptr, y_ptr, mean_ptr, rstd_ptr, x_row_stride, rows, columns: tl.constexpr, eps,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):
    column = tl.arange(0, COLUMNS)[None, :]
    weight = tl.load(weight_ptr + column, mask=column < columns, other=0.0)
    bias = tl.load(bias_ptr + column, mask=column < columns, other=0.0)
    for tile in tl.range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        row = (tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        mask = (column < columns) if ROWS == 1 else (row < rows) & (column < columns)
        x = load(x_ptr + row * x_row_stride + column, mask)
        normalised, mean, rstd = normalise(x, mask, columns, eps)
        y = normalised * weight.to(tl.float32) + bias.to(tl.float32)
        tl.store(y_ptr + row * columns + column, y.to(y_ptr.dtype.element_ty), mask=mask)
        if mean_ptr is not None:
            tl.store(mean_ptr + row, mean, mask=row < rows)
            tl.store(rstd_ptr + row, rstd, mask=row < rows)


@declare.declare(*FORWARD, flops=lambda shapes: 7 * math.prod(shapes["x_ptr"]))
@triton.jit
def layernorm_forward_looped_kernel(
    x_ptr, weight_ptr, bias_ptr, y_ptr, mean_ptr, rstd_ptr, x_row_stride, rows, columns, eps,
    COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):
    """Compute mean and variance in one reading: each lane keeps its own, and they are merged at the end.

    Each lane's: Welford, Technometrics 4(3), 1962. Merging: Chan, Golub and LeVeque, "Algorithms for computing the
    sample variance", The American Statistician 37(3), 1983.

    The variance's relative error is about columns eps sqrt(1 + (mean / deviation)^2). The error of
    mean(x^2) - mean(x)^2 has the square of that ratio. Sums of x minus one of its elements would cost less, but err as
    much as that difference if the element lies far from the others.
    """
    lane = tl.arange(0, COLUMNS)
    for row in tl.range(tl.program_id(0), rows, tl.num_programs(0)):
        x_row_ptr = x_ptr + tl.cast(row, tl.int64) * x_row_stride
        y_row_ptr = y_ptr + tl.cast(row, tl.int64) * columns
        means = tl.zeros([COLUMNS], tl.float32)
        squares = tl.zeros([COLUMNS], tl.float32)  # sums of (x - mean)^2
        for start in tl.range(0, columns, COLUMNS, num_stages=STAGES):
            column = start + lane
            x = load(x_row_ptr + column, column < columns)
            delta = tl.where(column < columns, x - means, 0.0)
            means += delta * (1.0 / (start // COLUMNS + 1))
            squares += delta * (x - means)
        count = (columns - lane + COLUMNS - 1) // COLUMNS
        mean = tl.sum(means * count, axis=0) / columns
        apart = means - mean
        rstd = tl.rsqrt(tl.sum(squares + apart * apart * count, axis=0) / columns + eps)
        if mean_ptr is not None:
            tl.store(mean_ptr + row, mean)
            tl.store(rstd_ptr + row, rstd)
        for start in tl.range(0, columns, COLUMNS, num_stages=STAGES):
            column = start + lane
            x = load(x_row_ptr + column, column < columns)
            weight = load(weight_ptr + column, column < columns)
            bias = load(bias_ptr + column, column < columns)
            y = (x - mean) * rstd * weight + bias
            tl.store(y_row_ptr + column, y.to(y_ptr.dtype.element_ty), mask=column < columns)


@declare.declare(*NORMALIZED_AGAIN, *DX, *PARTIALS, flops=lambda shapes: 13 * math.prod(shapes["x_ptr"]))
@triton.jit
def layernorm_backward_kernel(
    x_ptr, weight_ptr, mean_ptr, rstd_ptr, dy_ptr, dsum_ptr, dx_ptr, partial_ptr, x_row_stride, dy_row_stride,
    dsum_row_stride, rows, columns,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):
    column = tl.arange(0, COLUMNS)[None, :]
    shares = norm_backward(
        x_ptr, weight_ptr, mean_ptr, rstd_ptr, dy_ptr, dsum_ptr, dx_ptr, x_row_stride, dy_row_stride, dsum_row_stride,
        column, rows, columns, ROWS, COLUMNS, STAGES,
    )
    store_partials(partial_ptr, shares, column, columns, tl.program_id(0).to(tl.int64))


@declare.declare(*NORMALIZED_AGAIN, *DX, *PARTIALS, flops=lambda shapes: 19 * math.prod(shapes["x_ptr"]))
@triton.jit
def layernorm_backward_halves_kernel(
    x_ptr, weight_ptr, mean_ptr, rstd_ptr, dy_ptr, dsum_ptr, dx_ptr, partial_ptr, x_row_stride, dy_row_stride,
    dsum_row_stride, rows, columns,
    COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):
    """Programs (0, p) and (1, p) have the same rows. Each reads them whole and has the gradients of one half."""
    half = tl.program_id(0)
    column = half * COLUMNS + tl.arange(0, COLUMNS)
    other = (1 - half) * COLUMNS + tl.arange(0, COLUMNS)
    weight = tl.load(weight_ptr + column, mask=column < columns, other=0.0)
    dweight = tl.zeros([COLUMNS], tl.float32)
    dbias = tl.zeros([COLUMNS], tl.float32)
    for row in tl.range(tl.program_id(1), rows, tl.num_programs(1), num_stages=STAGES):
        x_row_ptr = x_ptr + tl.cast(row, tl.int64) * x_row_stride
        dy_row_ptr = dy_ptr + tl.cast(row, tl.int64) * dy_row_stride
        mean = tl.load(mean_ptr + row)
        rstd = tl.load(rstd_ptr + row)
        # Past the row's end dy is zero.
        x = load(x_row_ptr + column, column < columns)
        dy = load(dy_row_ptr + column, column < columns)
        normalised = (x - mean) * rstd
        dnormalised = dy * weight.to(tl.float32)
        other_x = load(x_row_ptr + other, other < columns)
        other_dy = load(dy_row_ptr + other, other < columns)
        # Held in registers, the other half's weight would take the last of 255.
        other_weight = load(weight_ptr + other, other < columns)
        other_dnormalised = other_dy * other_weight
        products = dnormalised * normalised + other_dnormalised * ((other_x - mean) * rstd)
        projection = tl.sum(products, axis=0) / columns
        dmean = tl.sum(dnormalised + other_dnormalised, axis=0) / columns
        dx = rstd * (dnormalised - dmean - normalised * projection)
        if dsum_ptr is not None:
            dsum_row_ptr = dsum_ptr + tl.cast(row, tl.int64) * dsum_row_stride
            dx += load(dsum_row_ptr + column, column < columns)
        dx_row_ptr = dx_ptr + tl.cast(row, tl.int64) * columns
        tl.store(dx_row_ptr + column, dx.to(dx_ptr.dtype.element_ty), mask=column < columns)
        dweight += dy * normalised
        dbias += dy
    partial_ptr += tl.program_id(1).to(tl.int64) * 2 * columns
    tl.store(partial_ptr + column, dweight, mask=column < columns)
    tl.store(partial_ptr + columns + column, dbias, mask=column < columns)


@declare.declare(*NORMALIZED_AGAIN, *DX, flops=lambda shapes: 10 * math.prod(shapes["x_ptr"]))
@triton.jit
def layernorm_backward_looped_kernel(
    x_ptr, weight_ptr, mean_ptr, rstd_ptr, dy_ptr, dsum_ptr, dx_ptr, x_row_stride, dy_row_stride, dsum_row_stride,
    rows, columns,
    COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):
    norm_backward_looped(
        x_ptr, weight_ptr, mean_ptr, rstd_ptr, dy_ptr, dsum_ptr, dx_ptr, x_row_stride, dy_row_stride, dsum_row_stride,
        rows, columns, COLUMNS, STAGES,
    )


@declare.declare(*NORMALIZED_AGAIN, *PARTIALS, flops=lambda shapes: 5 * math.prod(shapes["x_ptr"]))
@triton.jit
def layernorm_partials_kernel(
    x_ptr, mean_ptr, rstd_ptr, dy_ptr, partial_ptr, x_row_stride, dy_row_stride, rows, columns,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    shares = norm_shares(
        x_ptr, mean_ptr, rstd_ptr, dy_ptr, x_row_stride, dy_row_stride, column, rows, columns, ROWS, COLUMNS
    )
    store_partials(partial_ptr, shares, column, columns, tl.program_id(0).to(tl.int64))


BACKWARD_KERNELS = NormKernels(
    layernorm_backward_kernel, layernorm_backward_looped_kernel, layernorm_partials_kernel,
    layernorm_backward_halves_kernel,
)


@tuned
def configure_forward(rows: int, columns: int, element_bytes: int, multiprocessors: int) -> RowConfig:
    """Rows in registers; for 1025 to 8192 columns one resident set of programs, with two prefetched tiles each.

    The second sum waits for the first, so a prefetch helps. bfloat16 on an H200, 8192 rows of 4096 columns, by
    do_bench:

        40.4 us    three programs of 4 or 8 warps a multiprocessor
        41.0 us    four programs
        44.4 us    four programs without a prefetch
        45.3 us    one tile a program

    Rows of 257 to 1024 columns get one program each. 54,973 rows of 968 columns in float32 took 99.8 us so, and 116.3
    in tiles of four rows with a prefetch (`xlafuse tune`).
    """
    block = next_power_of_2(columns)
    if 512 <= block <= 1024:
        return RowConfig(1, block, max(1, block * element_bytes // 2048), 1, rows)
    if columns > 8192:
        return configure_rmsnorm.__wrapped__(rows, columns, element_bytes, multiprocessors)
    config = rows_in_registers(rows, columns, multiprocessors)
    resident = multiprocessors * max(2, min(16, 12288 // (config.block_rows * config.block_columns)))
    if config.programs <= resident:
        return config
    return replace(config, num_stages=3, programs=resident)


@tuned
def configure_backward(rows: int, columns: int, element_bytes: int, multiprocessors: int) -> RowConfig:
    """One program a multiprocessor, more for narrow rows; each holds x, dy, the weight and its shares of two sums.

    Each program writes two rows of fp32 partial sums that are read again. At 8192 x 4096 bfloat16 the sums of 132
    programs are 4% of the bytes that must move. So above 2048 columns a program takes 8192 elements at once; its
    registers (220 of 255 a thread in 8 warps on sm_90) leave no space for a second program.

    At 16,384 columns threads of 16 warps would spill 272 bytes each, so two programs share a row and spill none. By
    do_bench without the second kernel, 4096 such rows of bfloat16 take 120.6 us on an H200 with two rows prefetched,
    187 with one. They took 226 with the second kernel when a program had a whole row.

    Narrow rows take more and smaller programs. By `xlafuse tune`, with small programs and with 8192 elements each:

        54,973 rows of 968 columns, float32      184 and 341 us
        8192 rows of 768 columns, bfloat16      16.9 and 24.8 us
    """
    block = next_power_of_2(columns)
    if block > 16384:
        return RowConfig(1, 8192, 32, 1, min(rows, multiprocessors))
    if block > 8192:
        stages = 3 if element_bytes == 2 else 2  # three do not fit shared memory in fp32
        return RowConfig(1, 8192, 8, stages, min(rows, max(1, multiprocessors // 2)))
    elements = 8192 if block > 2048 else 8192 // element_bytes
    block_rows = rows_per_tile(rows, block, multiprocessors, elements)
    tile = block * block_rows
    resident = multiprocessors * max(1, min(16, 8192 // tile))
    return RowConfig(block_rows, block, max(1, min(8, tile // 1024)), 3, min(cdiv(rows, block_rows), resident))


def forward(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float, *, save: bool,
    config: RowConfig | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Launch the forward kernel; return y [rows, columns], contiguous, in x's dtype, and mean and rstd.

    mean, rstd: [rows] in fp32, or None without `save`.
    """
    rows, columns = x.shape
    y = torch.empty((rows, columns), dtype=x.dtype, device=x.device)
    mean = torch.empty(rows, dtype=torch.float32, device=x.device) if save else None
    rstd = torch.empty(rows, dtype=torch.float32, device=x.device) if save else None
    if y.numel() == 0:
        return y, mean, rstd
    x = with_unit_column_stride(x)
    weight, bias = weight.contiguous(), bias.contiguous()
    config = config or configure_forward(rows, columns, x.element_size(), multiprocessors(x.device))
    tensors, sizes = (x, weight, bias, y, mean, rstd), (x.stride(0), rows, columns, eps)
    with device_of(x):
        if config.block_columns < columns:
            layernorm_forward_looped_kernel[(config.programs,)](*tensors, *sizes, **config.looped)
        else:
            layernorm_forward_kernel[(config.programs,)](*tensors, *sizes, **config.whole_rows)
    return y, mean, rstd


def backward(
    x: torch.Tensor, weight: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor, dy: torch.Tensor,
    config: RowConfig | None = None, *, dsum: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Launch the backward kernels; return dx [rows, columns], contiguous, dweight and dbias [columns], in x's dtype.

    If a row has two tiles, two programs share it, and config.programs counts pairs.

    dsum: the gradient of x from its other readers, of x's shape. It is added to dx.
    """
    rows, columns = x.shape
    dx = torch.empty((rows, columns), dtype=x.dtype, device=x.device)
    if dx.numel() == 0:
        return dx, torch.zeros_like(weight), torch.zeros_like(weight)
    config = config or configure_backward(rows, columns, x.element_size(), multiprocessors(x.device))
    partial = torch.empty((config.programs, 2, columns), dtype=torch.float32, device=x.device)
    launch_norm_backward(BACKWARD_KERNELS, x, weight, (mean, rstd), dy, dsum, dx, partial, config)
    with declare.computing(*SUMS, sum_ptr="dweight", sum2_ptr="dbias"):
        dweight, dbias = sum_vectors(partial, x.dtype)
    return dx, dweight, dbias


class LayerNormFunction(torch.autograd.Function):
    """Save x, weight, mean and rstd. The backward pass reads x and dy once and writes dx, dweight and dbias."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
        y, mean, rstd = forward(x, weight, bias, eps, save=True)
        ctx.save_for_backward(x, weight, mean, rstd)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None]:
        x, weight, mean, rstd = ctx.saved_tensors
        dx, dweight, dbias = backward(x, weight, mean, rstd, dy)
        return dx, dweight, dbias, None


def layernorm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    """Return (x - mean(x)) / sqrt(var(x) + eps) * weight + bias over the columns of x.

    Differentiable once in all three.

    Args:
        x: [rows, columns], bfloat16, float16 or float32, on a GPU. Rows may be any distance apart; a matrix
            whose last stride is not 1 is copied.
        weight, bias: [columns], of x's dtype and device.
        eps: added to the variance.

    Returns:
        A new contiguous [rows, columns] tensor of x's dtype.

    Raises:
        ValueError: the shapes or devices do not fit, or the tensors are not on a GPU.
        TypeError: dtypes differ or are not supported.
    """
    check_tensors(x=x, weight=weight, bias=bias)
    check_matrix("x", x)
    check_vector("weight", weight, x)
    check_vector("bias", bias, x)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (x, weight, bias)):
        return LayerNormFunction.apply(x, weight, bias, eps)
    y, _, _ = forward(x, weight, bias, eps, save=False)
    return y


def apply(inputs: dict[str, torch.Tensor], **attributes: Any) -> dict[str, torch.Tensor]:
    """Run the block `layernorm`: x[rows, columns], weight[columns], bias[columns], eps -> y[rows, columns]."""
    return {"y": layernorm(inputs["x"], inputs["weight"], inputs["bias"], **attributes)}
