"""Bias, dropout, residual sum and layer norm between two products of a GPT-2 layer, forward and backward.

    h  = residual + m (x + bias),  m = scale if kept, else 0          mean, rstd = 1 / sqrt(var + eps) of the row of h
    y  = n weight + shift,  n = (h - mean) rstd

    dh_total = dh + rstd (g - mean(g) - n mean(g n)),  g = dy weight;  dh: the gradient of the output h
    dresidual = dh_total,  dx = m dh_total
    dbias = sum over rows of dx,  dweight = sum over rows of dy n,  dshift = sum over rows of dy

Srivastava et al., "Dropout", JMLR 15 (2014); Ba et al., "Layer Normalization", arXiv:1607.06450.

Shapes: x, residual, y, h and their gradients [rows, columns]. The vectors bias, weight, shift and their gradients are
[columns]; seed is [2] in int32. The statistics mean and rstd, [rows] in fp32, are saved only if a gradient is wanted.

bfloat16, float16 or float32 in and out; fp32 inside. h is rounded once, and the norm is of the stored h, which the
backward pass reads. Both passes draw the mask from the seed (shared/threefry.py).

A row is held in registers, with three column sums in the backward pass (shared/column_sums.py), so each tensor crosses
the memory bus once. Without a weight there is no norm: only h, and the gradients of x and bias. A layer ends this way
if the next norm belongs to another layer.

Rows of more than 16,384 columns do not fit and are refused. Bytes spilled a thread (bfloat16, compiled for an H200): 88
forward and 344 backward at 16,384 columns, 16 backward at 8192, 8 backward at 4096, and otherwise none.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from xlafuse.triton_side.blocks.dropout_residual_norm import check_dropout, dropout_constants
from xlafuse.triton_side.calls import declare
from xlafuse.triton_side.configs.tuned import tuned
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
    load,
    normalise,
    normalise_gradient,
    store_partials,
    tile_of_rows,
)
from xlafuse.triton_side.kernels.shared.threefry import uniforms

MAX_COLUMNS = 16384
Tensors = tuple[torch.Tensor, ...]
OptionalTensors = tuple[torch.Tensor | None, ...]

# Operations in the block's stages. The backward pass recomputes the mask and the normalised rows; mean and rstd are
# saved, so it repeats no sum.
FORWARD = (
    declare.forward("add", "bias"), declare.forward("threefry", "random"), declare.forward("select", "dropout"),
    declare.forward("add", "residual"),
    declare.forward("reduce_sum", "mean"), declare.forward("sub", "mean"),
    declare.forward("mul", "variance"), declare.forward("reduce_sum", "variance"),
    declare.forward("rsqrt", "normalize"), declare.forward("mul", "normalize"),
    declare.forward("mul", "affine"), declare.forward("add", "affine"),
)
BACKWARD = (
    declare.again("threefry", "random"), declare.again("sub", "mean"), declare.again("mul", "normalize"),
    declare.gradient("mul", "affine", "dnormalised"), declare.gradient("reduce_sum", "normalize", "projection"),
    declare.gradient("reduce_sum", "mean", "average"), declare.gradient("mul", "normalize", "dh"),
    declare.gradient("add", "residual", "dh"), declare.gradient("select", "dropout", "dx"),
    declare.gradient("reduce_sum", "bias", "partial"), declare.gradient("mul", "affine", "dweight"),
    declare.gradient("reduce_sum", "affine", "partial dweight"),
    declare.gradient("reduce_sum", "affine", "partial dshift"),
)
SUMS = (
    declare.gradient("reduce_sum", "bias", "dbias"), declare.gradient("reduce_sum", "affine", "dweight"),
    declare.gradient("reduce_sum", "affine", "dshift"),
)
# The operations without the norm.
FORWARD_WITHOUT_NORM = FORWARD[:4]
BACKWARD_WITHOUT_NORM = (
    declare.again("threefry", "random"), declare.gradient("select", "dropout", "dx"),
    declare.gradient("reduce_sum", "bias", "partial"),
)


@declare.declare(*FORWARD, flops=lambda shapes: (10 if "weight_ptr" in shapes else 3) * math.prod(shapes["x_ptr"]))
@triton.jit
def dropout_residual_norm_forward_kernel(
    x_ptr, bias_ptr, residual_ptr, weight_ptr, shift_ptr, seed_ptr, y_ptr, h_ptr, mean_ptr, rstd_ptr,
    x_row_stride, residual_row_stride, rows, columns: tl.constexpr, threshold, scale, eps,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):
    column = tl.arange(0, COLUMNS)[None, :]
    bias = tl.load(bias_ptr + column, mask=column < columns, other=0.0)
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + column, mask=column < columns, other=0.0)
        shift = tl.load(shift_ptr + column, mask=column < columns, other=0.0)
    for tile in tl.range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        row = (tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        mask = (column < columns) if ROWS == 1 else (row < rows) & (column < columns)
        x = load(x_ptr + row * x_row_stride + column, mask)
        residual = load(residual_ptr + row * residual_row_stride + column, mask)
        kept = uniforms(seed_ptr, row, COLUMNS) >= threshold
        h = residual + tl.where(kept, (x + bias.to(tl.float32)) * scale, 0.0)
        h = h.to(h_ptr.dtype.element_ty)
        tl.store(h_ptr + row * columns + column, h, mask=mask)
        if weight_ptr is not None:
            normalised, mean, rstd = normalise(h.to(tl.float32), column < columns, columns, eps)
            y = normalised * weight.to(tl.float32) + shift.to(tl.float32)
            tl.store(y_ptr + row * columns + column, y.to(y_ptr.dtype.element_ty), mask=mask)
            if mean_ptr is not None:
                tl.store(mean_ptr + row, mean, mask=row < rows)
                tl.store(rstd_ptr + row, rstd, mask=row < rows)


@declare.declare(*BACKWARD, flops=lambda shapes: (15 if "weight_ptr" in shapes else 2) * math.prod(shapes["dh_ptr"]))
@triton.jit
def dropout_residual_norm_backward_kernel(
    h_ptr, weight_ptr, seed_ptr, mean_ptr, rstd_ptr, dy_ptr, dh_ptr, dx_ptr, dresidual_ptr, partial_ptr,
    dy_row_stride, dh_row_stride, rows, columns, threshold, scale,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):
    column = tl.arange(0, COLUMNS)[None, :]
    dbias = tl.zeros([ROWS, COLUMNS], tl.float32)
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + column, mask=column < columns, other=0.0)
        dweight = tl.zeros([ROWS, COLUMNS], tl.float32)
        dshift = tl.zeros([ROWS, COLUMNS], tl.float32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        row, mask = tile_of_rows(tile, rows, column, columns, ROWS)
        dh = load(dh_ptr + row * dh_row_stride + column, mask)
        if weight_ptr is not None:
            h = load(h_ptr + row * columns + column, mask)
            dy = load(dy_ptr + row * dy_row_stride + column, mask)
            mean = tl.load(mean_ptr + row, mask=row < rows, other=0.0)
            rstd = tl.load(rstd_ptr + row, mask=row < rows, other=0.0)
            normalised = (h - mean) * rstd
            dh += normalise_gradient(dy, normalised, weight.to(tl.float32), rstd, columns, True)
            tl.store(dresidual_ptr + row * columns + column, dh.to(dresidual_ptr.dtype.element_ty), mask=mask)
            dweight += dy * normalised
            dshift += dy
        kept = uniforms(seed_ptr, row, COLUMNS) >= threshold
        dx = tl.where(kept, dh * scale, 0.0)
        tl.store(dx_ptr + row * columns + column, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        dbias += dx
    shares = (dbias,) if weight_ptr is None else (dbias, dweight, dshift)
    store_partials(partial_ptr, shares, column, columns, tl.program_id(0))


@tuned
def configure_forward(rows: int, columns: int, element_bytes: int, multiprocessors: int) -> RowConfig:
    """Thirty-two elements of each operand a thread, sixteen in rows longer than 4096; one tile a program.

    bfloat16 on an H200, 8192 rows of 4096 columns, by do_bench: 74.1 us with two rows for 8 warps, whose registers hold
    the vectors once for both rows. One row for 4 warps takes 83.2; resident programs that prefetch two rows take 76.1.
    """
    block = max(4, next_power_of_2(columns))  # one call of the generator makes four numbers
    block_rows = rows_per_tile(rows, block, multiprocessors, 8192)
    tile = block * block_rows
    num_warps = max(1, tile // 1024) if block <= 4096 else tile // 512
    return RowConfig(block_rows, block, num_warps, 1, cdiv(rows, block_rows))


@tuned
def configure_backward(rows: int, columns: int, element_bytes: int, multiprocessors: int) -> RowConfig:
    """One resident set of programs, with two tiles of three operands prefetched, or as many as fit in shared memory.

    There are few programs, because each writes three rows of fp32 partial sums. bfloat16 on an H200, 8192 rows of 4096
    columns, by do_bench: 91.7 us with two programs of 4 warps a multiprocessor; 110.4 with three; 103.1 with one of 8
    warps; 110.6 with one of 16; 117.5 with one tile prefetched. A thread has thirty-two elements, or sixteen in rows
    longer than 8192, where they would spill.
    """
    block = max(4, next_power_of_2(columns))
    block_rows = rows_per_tile(rows, block, multiprocessors)
    tile = block * block_rows
    in_flight = min(2, 131072 // (3 * tile * element_bytes))  # shared memory also holds an fp32 row that changes layout
    resident = multiprocessors * max(1, min(16, 8192 // tile))
    num_warps = max(1, tile // 1024) if tile <= 8192 else tile // 512
    return RowConfig(block_rows, block, num_warps, in_flight + 1, min(cdiv(rows, block_rows), resident))


def forward(
    x: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, shift: torch.Tensor,
    seed: torch.Tensor, p: float, eps: float, *, save_statistics: bool, config: RowConfig | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Launch the forward kernel; return y and h [rows, columns], contiguous, in x's dtype, and mean and rstd.

    mean, rstd: [rows] in fp32, or None without save_statistics.
    """
    y, h = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    mean, rstd = (
        torch.empty(len(x), dtype=torch.float32, device=x.device) if save_statistics else None for _ in range(2)
    )
    if y.numel():
        vectors = bias.contiguous(), weight.contiguous(), shift.contiguous()
        _launch_forward(x, residual, vectors, seed, (y, h, mean, rstd), p, eps, config)
    return y, h, mean, rstd


def forward_without_norm(
    x: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor, seed: torch.Tensor, p: float,
    config: RowConfig | None = None,
) -> torch.Tensor:
    """Launch the forward kernel without the norm; return h [rows, columns], contiguous, in x's dtype."""
    h = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    with declare.computing(*FORWARD_WITHOUT_NORM):
        _launch_forward(x, residual, (bias.contiguous(), None, None), seed, (None, h, None, None), p, 0.0, config)
    return h


def _launch_forward(
    x: torch.Tensor, residual: torch.Tensor, vectors: OptionalTensors, seed: torch.Tensor, results: OptionalTensors,
    p: float, eps: float, config: RowConfig | None,
) -> None:
    """Write the results y, h, mean and rstd. vectors: bias, weight, shift."""
    bias, weight, shift = vectors
    x, residual = with_unit_column_stride(x), with_unit_column_stride(residual)
    config = config or configure_forward(*x.shape, x.element_size(), multiprocessors(x.device))
    with device_of(x):
        dropout_residual_norm_forward_kernel[(config.programs,)](
            x, bias, residual, weight, shift, seed.contiguous(), *results, x.stride(0), residual.stride(0), *x.shape,
            *dropout_constants(p), eps, **config.whole_rows,
        )


def backward(
    h: torch.Tensor, weight: torch.Tensor, seed: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor,
    dy: torch.Tensor, dh: torch.Tensor, p: float, config: RowConfig | None = None,
) -> Tensors:
    """Launch the backward kernels on a contiguous h; return dx, dbias, dresidual, dweight, dshift.

    All are contiguous, in h's dtype.
    """
    dx, dresidual = (torch.empty(h.shape, dtype=h.dtype, device=h.device) for _ in range(2))
    if h.numel() == 0:
        dbias, dweight, dshift = (torch.zeros(h.shape[1], dtype=h.dtype, device=h.device) for _ in range(3))
        return dx, dbias, dresidual, dweight, dshift
    saved = (h, weight.contiguous(), seed.contiguous(), mean, rstd)
    partial = _launch_backward(saved, with_unit_column_stride(dy), dh, dx, dresidual, p, config)
    with declare.computing(*SUMS, sum_ptr="dbias", sum2_ptr="dweight", sum3_ptr="dshift"):
        dbias, dweight, dshift = sum_vectors(partial, h.dtype)
    return dx, dbias, dresidual, dweight, dshift


def backward_without_norm(
    dh: torch.Tensor, seed: torch.Tensor, p: float, config: RowConfig | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the backward kernels without the norm; return dx [rows, columns], contiguous, and dbias [columns].

    Both have dh's dtype. dresidual is dh itself.
    """
    dx = torch.empty(dh.shape, dtype=dh.dtype, device=dh.device)
    with declare.computing(*BACKWARD_WITHOUT_NORM):
        partial = _launch_backward((None, None, seed.contiguous(), None, None), None, dh, dx, None, p, config)
    with declare.computing(SUMS[0], sum_ptr="dbias"):
        return dx, sum_vectors(partial, dh.dtype)[0]


def _launch_backward(
    saved: OptionalTensors, dy: torch.Tensor | None, dh: torch.Tensor, dx: torch.Tensor,
    dresidual: torch.Tensor | None, p: float, config: RowConfig | None,
) -> torch.Tensor:
    """Write dx and dresidual; return the programs' shares of dbias, and with a norm of dweight and dshift.

    saved: h, weight, seed, mean, rstd.
    """
    dh = with_unit_column_stride(dh)
    rows, columns = dh.shape
    config = config or configure_backward(rows, columns, dh.element_size(), multiprocessors(dh.device))
    partial = torch.empty((config.programs, 1 if dy is None else 3, columns), dtype=torch.float32, device=dh.device)
    with device_of(dh):
        dropout_residual_norm_backward_kernel[(config.programs,)](
            *saved, dy, dh, dx, dresidual, partial, 0 if dy is None else dy.stride(0), dh.stride(0), rows, columns,
            *dropout_constants(p), **config.whole_rows,
        )
    return partial


class DropoutResidualNormFunction(torch.autograd.Function):
    """Save h, weight, seed, mean and rstd. The backward pass reads h, dy and dh once and writes dx and dresidual."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor,
        shift: torch.Tensor, seed: torch.Tensor, p: float, eps: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        y, h, mean, rstd = forward(x, bias, residual, weight, shift, seed, p, eps, save_statistics=True)
        ctx.save_for_backward(h, weight, seed, mean, rstd)
        ctx.p = p
        return y, h

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor, dh: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        h, weight, seed, mean, rstd = ctx.saved_tensors
        return *backward(h, weight, seed, mean, rstd, dy, dh, ctx.p), None, None, None


def dropout_residual_norm(
    x: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, shift: torch.Tensor,
    seed: torch.Tensor, *, p: float, eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (y, h) with h = residual + dropout(x + bias) and y = layer_norm(h) weight + shift over the columns.

    Differentiable once in all but the seed.

    Args:
        x, residual: [rows, columns], bfloat16, float16 or float32, on a GPU, 1 to 16,384 columns. Rows may be any
            distance apart; a matrix whose last stride is not 1 is copied.
        bias, weight, shift: [columns], of x's dtype and device.
        seed: [2] in int32 on x's device; the same seed gives the same mask.
        p: probability of an element to be dropped, 0 <= p < 1, rounded up to a multiple of 2^-16. Kept elements are
            multiplied by 1 / (1 - p), with the rounded p.
        eps: added to the variance.

    Returns:
        New contiguous [rows, columns] tensors of x's dtype.

    Raises:
        ValueError: p is out of range, shapes or devices do not fit, there are too many columns, or the tensors are not
            on a GPU.
        TypeError: dtypes differ or are not supported, or the seed is not int32.
    """
    check_tensors(x=x, bias=bias, residual=residual, weight=weight, shift=shift)
    check_matrix("x", x)
    rows, columns = x.shape
    if residual.shape != x.shape:
        raise ValueError(f"residual must be of x's shape {tuple(x.shape)}, got {tuple(residual.shape)}")
    for name, vector in (("bias", bias), ("weight", weight), ("shift", shift)):
        check_vector(name, vector, x)
    if columns > MAX_COLUMNS:
        raise ValueError(f"x must have at most {MAX_COLUMNS} columns, because registers hold a row, got {columns}")
    check_dropout(x, seed, p)
    tensors = (x, bias, residual, weight, shift)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return DropoutResidualNormFunction.apply(*tensors, seed, p, eps)
    y, h, _, _ = forward(*tensors, seed, p, eps, save_statistics=False)
    return y, h


def apply(inputs: dict[str, torch.Tensor], **attributes: Any) -> dict[str, torch.Tensor]:
    """Run the block `dropout_residual_norm`.

    x, residual [rows, columns], bias, weight, shift [columns], seed [2], p, eps -> y and h [rows, columns].
    """
    tensors = (inputs[name] for name in ("x", "bias", "residual", "weight", "shift", "seed"))
    y, h = dropout_residual_norm(*tensors, **attributes)
    return {"y": y, "h": h}
