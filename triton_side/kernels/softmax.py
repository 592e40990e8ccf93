"""Softmax over the columns of a matrix, forward and backward.

    y = exp(x - max(x)) / sum(exp(x - max(x)))        dx = y * (dy - sum(y * dy))

A row of nothing but -inf gives zeros in y, and so in dx.

Shapes: x, y, dy, dx [rows, columns]. bfloat16, float16 or float32 in and out; fp32 inside. The forward pass saves only
the stored y, which the backward pass reads.

A row is read once and held in registers. The looped kernels read longer rows twice. The second reading mostly hits a
cache, because only the rows of the resident programs are in use. The looped kernels keep 16-byte accesses in rows that
begin anywhere, as with the 50,257 columns of a vocabulary. Their forward pass, and that of the longest rows in
registers, computes maximum and sum together (Milakov and Gimelshein, "Online normalizer calculation for softmax",
arXiv:1805.02867).
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from xlafuse.triton_side.calls import declare
from xlafuse.triton_side.configs.tuned import tuned
from xlafuse.triton_side.kernels.shared.constants import LOWEST
from xlafuse.triton_side.kernels.shared.launch import (
    RowConfig,
    cdiv,
    check_matrix,
    check_tensors,
    device_of,
    multiprocessors,
    next_power_of_2,
    rows_per_tile,
    with_unit_column_stride,
)
from xlafuse.triton_side.kernels.shared.row_reduction import add_to_softmax, exp, load, tile_of_rows

FORWARD = (
    declare.forward("reduce_max", "max"), declare.forward("sub", "exp"), declare.forward("exp", "exp"),
    declare.forward("reduce_sum", "sum"), declare.forward("div", "divide"),
)
# dx = y (dy - sum(y dy)) combines the gradients of the quotient, of its sum and of the exponentials.
BACKWARD = (
    declare.gradient("mul", "divide"), declare.gradient("reduce_sum", "sum"), declare.gradient("sub", "divide"),
    declare.gradient("mul", "exp"),
)


@triton.jit
def _divide(numerator, denominator, ACCURATE: tl.constexpr):
    """Return the quotient; 16-bit results use one reciprocal a row, whose rounding an fp32 result would show."""
    if ACCURATE:
        return tl.div_rn(numerator, denominator)
    else:
        return numerator * tl.div_rn(1.0, denominator)


@triton.jit
def _to_sum(x, ACCURATE: tl.constexpr):
    """Return x in the dtype of its sum: fp64 for fp32 results, for which an H200 has enough units.

    Otherwise the roundings of the additions, not the one division, would be the error of the largest elements (4.7
    times that of plain code at 4093 columns).
    """
    if ACCURATE:
        return x.to(tl.float64)
    else:
        return x


@declare.declare(*FORWARD, flops=lambda shapes: 5 * math.prod(shapes["y_ptr"]))
@triton.jit
def softmax_forward_kernel(
    x_ptr, y_ptr, x_row_stride, rows, columns,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):
    accurate: tl.constexpr = y_ptr.dtype.element_ty == tl.float32
    column = tl.arange(0, COLUMNS)[None, :]
    for tile in tl.range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        row, mask = tile_of_rows(tile, rows, column, columns, ROWS)
        x = tl.load(x_ptr + row * x_row_stride + column, mask=mask, other=-float("inf")).to(tl.float32)
        # Subtraction before scaling keeps the exponent exact to half an ulp for any magnitude of x.
        maximum = tl.maximum(tl.max(x, axis=1, keep_dims=True), LOWEST)
        numerator = exp(x - maximum, accurate)
        denominator = tl.sum(_to_sum(numerator, accurate), axis=1, keep_dims=True).to(tl.float32)
        denominator = tl.where(denominator == 0.0, 1.0, denominator)  # a row of nothing but -inf
        y = _divide(numerator, denominator, accurate)
        tl.store(y_ptr + row * columns + column, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _join(maximum, total, other_maximum, other_total):
    """Return the maximum of both parts of a row, and the sum of exp(x - maximum) over them."""
    joint = tl.maximum(maximum, other_maximum)
    return joint, total * exp(maximum - joint, False) + other_total * exp(other_maximum - joint, False)


@declare.declare(*FORWARD, flops=lambda shapes: 5 * math.prod(shapes["y_ptr"]))
@triton.jit
def softmax_forward_joint_kernel(
    x_ptr, y_ptr, x_row_stride, rows, columns,
    COLUMNS: tl.constexpr, STAGES: tl.constexpr, VECTOR: tl.constexpr,
):
    """Reduce a row of 16-bit results once, to its maximum and sum; each VECTOR columns begin with their own."""
    column = tl.arange(0, COLUMNS // VECTOR)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    for row in tl.range(tl.program_id(0), rows, tl.num_programs(0), num_stages=STAGES):
        x_row_ptr = x_ptr + tl.cast(row, tl.int64) * x_row_stride
        x = tl.load(x_row_ptr + column, mask=column < columns, other=-float("inf")).to(tl.float32)
        maximum = tl.maximum(tl.max(x, axis=1, keep_dims=True), LOWEST)
        numerator = exp(x - maximum, False)
        total = tl.sum(numerator, axis=1, keep_dims=True)
        row_maximum, denominator = tl.reduce((maximum, total), 0, _join, keep_dims=True)
        denominator = tl.where(denominator == 0.0, 1.0, denominator)  # a row of nothing but -inf
        y = numerator * _divide(exp(maximum - row_maximum, False), denominator, False)
        y_row_ptr = y_ptr + tl.cast(row, tl.int64) * columns
        tl.store(y_row_ptr + column, y.to(y_ptr.dtype.element_ty), mask=column < columns)


@triton.jit
def _row_body(start, columns, EDGES: tl.constexpr, VECTOR: tl.constexpr):
    """Return where a row's whole 16-byte vectors begin, relative to its first element, and their number."""
    if EDGES:
        head = tl.minimum(tl.cdiv(start, VECTOR) * VECTOR - start, columns).to(tl.int32)
    else:
        head = 0
    return head, (columns - head) // VECTOR


@triton.jit
def _edge_columns(head, vectors, columns, VECTOR: tl.constexpr):
    """Return the columns before a row's whole vectors and after them, fewer than VECTOR each, and their mask."""
    edge = tl.arange(0, 2 * VECTOR)
    column = tl.where(edge < VECTOR, edge, edge - VECTOR + head + vectors * VECTOR)
    return column, tl.where(edge < VECTOR, edge < head, column < columns)


@declare.declare(*FORWARD, flops=lambda shapes: 5 * math.prod(shapes["y_ptr"]))
@triton.jit
def softmax_forward_looped_kernel(
    x_ptr, y_ptr, x_row_stride, rows, columns,
    COLUMNS: tl.constexpr, STAGES: tl.constexpr, EDGES: tl.constexpr, VECTOR: tl.constexpr,
):
    """Read a row twice, with hints that caches keep x until its second reading, and do not keep y."""
    accurate: tl.constexpr = y_ptr.dtype.element_ty == tl.float32
    vectors_per_tile: tl.constexpr = COLUMNS // VECTOR
    lane = tl.arange(0, vectors_per_tile)[:, None]
    element = tl.arange(0, VECTOR)[None, :]
    for row in tl.range(tl.program_id(0), rows, tl.num_programs(0)):
        x_start = tl.cast(row, tl.int64) * x_row_stride
        y_start = tl.cast(row, tl.int64) * columns
        head, vectors = _row_body(y_start, columns, EDGES, VECTOR)
        x_body_ptr, y_body_ptr = x_ptr + x_start, y_ptr + y_start
        if EDGES:
            # The product shows the compiler the alignment; x and y have the same row stride.
            y_body_ptr = y_ptr + tl.cdiv(y_start, VECTOR) * VECTOR
            x_body_ptr = x_ptr + tl.cdiv(y_start, VECTOR) * VECTOR
        tiles = tl.cdiv(vectors, vectors_per_tile)

        maximum = tl.full([vectors_per_tile, 1], LOWEST, tl.float32)
        partial_sum = tl.zeros([vectors_per_tile, 1], tl.float32)
        for tile in tl.range(0, tiles, num_stages=STAGES):
            vector = tile * vectors_per_tile + lane
            x = tl.load(
                x_body_ptr + vector * VECTOR + element, mask=vector < vectors, other=-float("inf"),
                eviction_policy="evict_last",
            ).to(tl.float32)
            maximum, partial_sum = add_to_softmax(maximum, partial_sum, x, accurate)
        row_maximum = tl.max(maximum)
        if EDGES:
            edge_column, edge_mask = _edge_columns(head, vectors, columns, VECTOR)
            edge = tl.load(x_ptr + x_start + edge_column, mask=edge_mask, other=-float("inf")).to(tl.float32)
            row_maximum = tl.maximum(row_maximum, tl.max(edge))
        partial_sum *= exp(maximum - row_maximum, accurate)
        denominator = tl.sum(_to_sum(partial_sum, accurate))
        if EDGES:
            edge = exp(edge - row_maximum, accurate)
            denominator += tl.sum(_to_sum(edge, accurate))
        denominator = denominator.to(tl.float32)
        denominator = tl.where(denominator == 0.0, 1.0, denominator)  # a row of nothing but -inf
        if EDGES:
            edge = _divide(edge, denominator, accurate)
            tl.store(y_ptr + y_start + edge_column, edge.to(y_ptr.dtype.element_ty), mask=edge_mask)

        # Backwards: the end of the row was read last and is most likely still in a cache.
        for tile in tl.range(0, tiles, num_stages=STAGES):
            vector = (tiles - 1 - tile) * vectors_per_tile + lane
            x = tl.load(
                x_body_ptr + vector * VECTOR + element, mask=vector < vectors, other=-float("inf"),
                eviction_policy="evict_first",
            ).to(tl.float32)
            y = _divide(exp(x - row_maximum, accurate), denominator, accurate).to(y_ptr.dtype.element_ty)
            tl.store(y_body_ptr + vector * VECTOR + element, y, mask=vector < vectors, cache_modifier=".cs")


@declare.declare(*BACKWARD, flops=lambda shapes: 4 * math.prod(shapes["y_ptr"]))
@triton.jit
def softmax_backward_kernel(
    y_ptr, dy_ptr, dx_ptr, y_row_stride, dy_row_stride, rows, columns,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):
    column = tl.arange(0, COLUMNS)[None, :]
    for tile in tl.range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        row, mask = tile_of_rows(tile, rows, column, columns, ROWS)
        y = load(y_ptr + row * y_row_stride + column, mask)
        dy = load(dy_ptr + row * dy_row_stride + column, mask)
        dx = y * (dy - tl.sum(y * dy, axis=1, keep_dims=True))
        tl.store(dx_ptr + row * columns + column, dx.to(dx_ptr.dtype.element_ty), mask=mask)


@declare.declare(*BACKWARD, flops=lambda shapes: 4 * math.prod(shapes["y_ptr"]))
@triton.jit
def softmax_backward_looped_kernel(
    y_ptr, dy_ptr, dx_ptr, y_row_stride, dy_row_stride, rows, columns,
    COLUMNS: tl.constexpr, STAGES: tl.constexpr, EDGES: tl.constexpr, VECTOR: tl.constexpr,
):
    vectors_per_tile: tl.constexpr = COLUMNS // VECTOR
    lane = tl.arange(0, vectors_per_tile)[:, None]
    element = tl.arange(0, VECTOR)[None, :]
    for row in tl.range(tl.program_id(0), rows, tl.num_programs(0)):
        y_start = tl.cast(row, tl.int64) * y_row_stride
        dy_start = tl.cast(row, tl.int64) * dy_row_stride
        dx_start = tl.cast(row, tl.int64) * columns
        head, vectors = _row_body(dx_start, columns, EDGES, VECTOR)
        y_body_ptr, dy_body_ptr, dx_body_ptr = y_ptr + y_start, dy_ptr + dy_start, dx_ptr + dx_start
        if EDGES:
            y_body_ptr = y_ptr + tl.cdiv(dx_start, VECTOR) * VECTOR
            dy_body_ptr = dy_ptr + tl.cdiv(dx_start, VECTOR) * VECTOR
            dx_body_ptr = dx_ptr + tl.cdiv(dx_start, VECTOR) * VECTOR
        tiles = tl.cdiv(vectors, vectors_per_tile)

        partial_dot = tl.zeros([vectors_per_tile, VECTOR], tl.float32)
        for tile in tl.range(0, tiles, num_stages=STAGES):
            vector = tile * vectors_per_tile + lane
            column = vector * VECTOR + element
            y = tl.load(y_body_ptr + column, mask=vector < vectors, other=0.0).to(tl.float32)
            dy = tl.load(dy_body_ptr + column, mask=vector < vectors, other=0.0).to(tl.float32)
            partial_dot += y * dy
        dot = tl.sum(partial_dot)
        if EDGES:
            edge_column, edge_mask = _edge_columns(head, vectors, columns, VECTOR)
            edge_y = tl.load(y_ptr + y_start + edge_column, mask=edge_mask, other=0.0).to(tl.float32)
            edge_dy = tl.load(dy_ptr + dy_start + edge_column, mask=edge_mask, other=0.0).to(tl.float32)
            dot += tl.sum(edge_y * edge_dy)
            edge_dx = (edge_y * (edge_dy - dot)).to(dx_ptr.dtype.element_ty)
            tl.store(dx_ptr + dx_start + edge_column, edge_dx, mask=edge_mask)

        for tile in tl.range(0, tiles, num_stages=STAGES):
            vector = (tiles - 1 - tile) * vectors_per_tile + lane
            column = vector * VECTOR + element
            y = tl.load(y_body_ptr + column, mask=vector < vectors, other=0.0).to(tl.float32)
            dy = tl.load(dy_body_ptr + column, mask=vector < vectors, other=0.0).to(tl.float32)
            dx = (y * (dy - dot)).to(dx_ptr.dtype.element_ty)
            tl.store(dx_body_ptr + column, dx, mask=vector < vectors)


def rows_have_edges(columns: int) -> bool:
    """Return whether rows begin or end inside a 16-byte vector, or Triton cannot tell that they do not.

    Triton specialises an integer argument on being a multiple of 16. Any other row length would prevent 16-byte
    accesses, so the looped kernels then take whole vectors, and separately the elements before and after
    them. For that, all matrices must have the same row stride.
    """
    return columns % 16 != 0


@tuned
def configure_forward(rows: int, columns: int, element_bytes: int, multiprocessors: int) -> RowConfig:
    """Sixteen elements a thread, one row a program; the longest rows take the looped kernel.

    bfloat16 on an H200 in GB/s, where a copy reaches 4000 to 4250:

        | 1024 columns      4116 with a row and two warps a program, 3682 with four rows and eight
        | 4096 columns      4025 with 8 warps, 3966 with 4, 3122 with 16, 3577 persistent with a prefetch
        | 16,384 columns    3903 with 16 warps, 3698 persistent with a prefetch
        | 32,768 columns    3860 with two rows prefetched, 3329 without
        | 131,072 columns   looped, without cache hints: 2616 with 32 warps, 2315 with 16

    A row of 32,768 columns fills a multiprocessor's registers, so no other program runs there to hide its loads, and
    the prefetch does. In fp32 the prefetched rows do not fit. By do_bench such rows take 272.6 us with one reduction,
    284.7 with two (8192 rows). 50,257 columns, looped: 252 us with three programs a multiprocessor, 266 with two, 282
    with three and no cache hints (4096 rows).
    """
    block = next_power_of_2(columns)
    if block > 32768 or (block > 8192 and rows_have_edges(columns)):
        # Some programs read while others write, as long as the rows they read twice stay in 40 of the 50 MB of L2.
        resident = max(1, min(3, 40_000_000 // (multiprocessors * columns * element_bytes)))
        num_warps = 16 if resident > 1 else 32
        return RowConfig(1, 1024 * num_warps // element_bytes, num_warps, 1, min(rows, resident * multiprocessors))
    if block > 16384:
        if block * element_bytes > 65536:
            return RowConfig(1, block, 32, 1, rows)
        return RowConfig(1, block, 32, 3, min(rows, multiprocessors))
    block_rows = max(1, 1024 // block)
    num_warps = max(1, min(16 if block > 8192 else 8, block * block_rows // 512))
    return RowConfig(block_rows, block, num_warps, 1, cdiv(rows, block_rows))


@tuned
def configure_backward(rows: int, columns: int, element_bytes: int, multiprocessors: int) -> RowConfig:
    """Tiles as in the forward pass, but a program holds two rows at once, and no prefetch helps.

    On an H200, 4096 columns of bfloat16: 4311 GB/s with 8 warps, 4250 with 4, 3898 with 16. 32,768 columns: 4031 in
    registers, 3656 with a prefetch, 3496 looped. In fp32 these spill, and take the looped kernel.
    """
    block = next_power_of_2(columns)
    if block * element_bytes > 65536 or (block > 8192 and rows_have_edges(columns)):
        return RowConfig(1, 16384 // element_bytes, 32, 1, min(rows, multiprocessors))
    if block > 8192:
        return RowConfig(1, block, block * element_bytes // 2048, 1, rows)
    block_rows = rows_per_tile(rows, block, multiprocessors)
    num_warps = max(1, min(8, block * block_rows // 512))
    return RowConfig(block_rows, block, num_warps, 1, cdiv(rows, block_rows))


def forward(x: torch.Tensor, config: RowConfig | None = None) -> torch.Tensor:
    """Launch the forward kernel on x [rows, columns]; the result y is contiguous, in x's dtype."""
    rows, columns = x.shape
    y = torch.empty((rows, columns), dtype=x.dtype, device=x.device)
    if y.numel() == 0:
        return y
    x = with_unit_column_stride(x)
    config = config or configure_forward(rows, columns, x.element_size(), multiprocessors(x.device))
    with device_of(x):
        if config.block_columns < columns:
            edges = rows_have_edges(columns)
            x = x.contiguous() if edges else x
            softmax_forward_looped_kernel[(config.programs,)](
                x, y, x.stride(0), rows, columns,
                EDGES=edges, VECTOR=16 // x.element_size(), **config.looped,
            )
        elif config.block_rows == 1 and config.num_stages > 1 and x.element_size() == 2:
            # A program that prefetches has the multiprocessor for itself: nothing else runs during its reductions.
            softmax_forward_joint_kernel[(config.programs,)](
                x, y, x.stride(0), rows, columns,
                VECTOR=min(32, config.block_columns), **config.looped,
            )
        else:
            softmax_forward_kernel[(config.programs,)](
                x, y, x.stride(0), rows, columns,
                **config.whole_rows,
            )
    return y


def backward(y: torch.Tensor, dy: torch.Tensor, config: RowConfig | None = None) -> torch.Tensor:
    """Launch the backward kernel on y, dy [rows, columns]; the result dx is contiguous, in y's dtype."""
    rows, columns = y.shape
    dx = torch.empty((rows, columns), dtype=y.dtype, device=y.device)
    if dx.numel() == 0:
        return dx
    y, dy = with_unit_column_stride(y), with_unit_column_stride(dy)
    config = config or configure_backward(rows, columns, y.element_size(), multiprocessors(y.device))
    with device_of(y):
        if config.block_columns < columns:
            edges = rows_have_edges(columns)
            y, dy = (y.contiguous(), dy.contiguous()) if edges else (y, dy)
            softmax_backward_looped_kernel[(config.programs,)](
                y, dy, dx, y.stride(0), dy.stride(0), rows, columns,
                EDGES=edges, VECTOR=16 // y.element_size(), **config.looped,
            )
        else:
            softmax_backward_kernel[(config.programs,)](
                y, dy, dx, y.stride(0), dy.stride(0), rows, columns,
                **config.whole_rows,
            )
    return dx


class SoftmaxFunction(torch.autograd.Function):
    """Save y. The backward pass reads y and dy once and writes dx."""

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
    """Return softmax over the columns of x, differentiable once.

    Args:
        x: [rows, columns], bfloat16, float16 or float32, on a GPU. Rows may be any distance apart; a matrix
            whose last stride is not 1 is copied.

    Returns:
        A new contiguous [rows, columns] tensor of x's dtype. A row of nothing but -inf gives zeros and zero
        gradients; one that holds NaN or +inf is NaN, as in torch.softmax.

    Raises:
        ValueError: x is not [rows, columns], or not on a GPU.
        TypeError: x has another dtype.
    """
    check_tensors(x=x)
    check_matrix("x", x)
    return SoftmaxFunction.apply(x)


def apply(inputs: dict[str, torch.Tensor], masked: int = 0) -> dict[str, torch.Tensor]:
    """Run the block `softmax`: x[rows, columns] -> y[rows, columns]. `masked` is not used."""
    return {"y": softmax(inputs["x"])}
