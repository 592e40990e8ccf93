"""Parts that all matrix product kernels share: the order of tiles, operand loads, and the product of one tile.

Programs compute the output tiles in groups of rows, so the operands' tiles stay in L2. This is the order of Triton's
persistent matmul tutorial. If the operands' strides allow it, TMA tensor descriptors read them, and each multiprocessor
runs one or a few persistent programs, each for many tiles. Otherwise, masked pointers read them, and each program
computes one tile.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from xlafuse.triton_side.kernels.shared.launch import cdiv, multiprocessors
from xlafuse.triton_side.kernels.shared.tiles import (
    add_product,
    add_separate_product,
    fits_descriptor,
)


@dataclass(frozen=True)
class MatmulConfig:
    """The launch configuration of a product.

    block_m, block_n: the output tile that a program computes at a time.
    block_k: the length of the inner axis in one step of the loop.
    group_m: the number of tiles, one below the other, to compute before the next column of tiles.
    descriptors: TMA reads the operands and programs are persistent; otherwise each program computes one tile.
    programs: persistent programs per multiprocessor; more than one if the resources of several fit.
    splits: programs that share the inner axis of one tile (`shared/split_tiles.py`), 1 for persistent programs.
        Only `matmul_kernel` splits; other kernels compute each tile in one program.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    group_m: int = 8
    descriptors: bool = True
    programs: int = 1
    splits: int = 1


@triton.jit
def tile_at(tile, m, n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr):
    """Return the first row and column of output tile `tile`.

    Tiles are numbered down a column of GROUP_M tiles, then down the next column to the right.
    """
    n_tiles = tl.cdiv(n, BLOCK_N)
    group = tile // (GROUP_M * n_tiles)
    first = group * GROUP_M
    height = tl.minimum(tl.cdiv(m, BLOCK_M) - first, GROUP_M)
    within = tile % (GROUP_M * n_tiles)
    return (first + within % height) * BLOCK_M, within // height * BLOCK_N


@triton.jit
def open_operand(
    pointer, rows, columns, stride_row, stride_column,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DESCRIPTOR: tl.constexpr, TRANSPOSED: tl.constexpr,
):
    """Return the descriptor or pointer through which `load_operand` reads a [rows, columns] matrix.

    TRANSPOSED: the matrix is stored column by column.
    """
    if DESCRIPTOR:
        if TRANSPOSED:
            return tl.make_tensor_descriptor(pointer, [columns, rows], [stride_column, 1], [COLUMNS, ROWS])
        else:
            return tl.make_tensor_descriptor(pointer, [rows, columns], [stride_row, 1], [ROWS, COLUMNS])
    else:
        return pointer


# A tile's origin is a 64-bit scalar, and offsets within the tile are 32-bit. With 64-bit offsets, epilogues spill.
@triton.jit
def load_strided_tile(
    pointer, row, column, rows, columns, stride_row, stride_column, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Return the [ROWS, COLUMNS] tile at (row, column) of a matrix, zero outside it."""
    r = tl.arange(0, ROWS)[:, None]
    c = tl.arange(0, COLUMNS)[None, :]
    origin = pointer + (tl.cast(row, tl.int64) * stride_row + tl.cast(column, tl.int64) * stride_column)
    inside = (r < rows - row) & (c < columns - column)
    return tl.load(origin + (r * stride_row + c * stride_column), mask=inside, other=0.0)


@triton.jit
def load_operand(
    source, row, column, rows, columns, stride_row, stride_column,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DESCRIPTOR: tl.constexpr, TRANSPOSED: tl.constexpr,
):
    """Return the [ROWS, COLUMNS] tile at (row, column), zero outside the matrix."""
    if DESCRIPTOR:
        if TRANSPOSED:
            return source.load([column, row]).T
        else:
            return source.load([row, column])
    else:
        return load_strided_tile(source, row, column, rows, columns, stride_row, stride_column, ROWS, COLUMNS)


@triton.jit
def store_tile(pointer, value, row, column, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Write a tile to (row, column) of a contiguous [rows, columns] matrix, in the matrix's dtype."""
    r = tl.arange(0, ROWS)[:, None]
    c = tl.arange(0, COLUMNS)[None, :]
    inside = (r < rows - row) & (c < columns - column)
    origin = pointer + (tl.cast(row, tl.int64) * columns + column)
    tl.store(origin + (r * columns + c), value.to(pointer.dtype.element_ty), mask=inside)


@triton.jit
def load_tile(pointer, row, column, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the tile at (row, column) of a contiguous [rows, columns] matrix, in float32."""
    r = tl.arange(0, ROWS)[:, None]
    c = tl.arange(0, COLUMNS)[None, :]
    inside = (r < rows - row) & (c < columns - column)
    origin = pointer + (tl.cast(row, tl.int64) * columns + column)
    return tl.load(origin + (r * columns + c), mask=inside, other=0.0).to(tl.float32)


@triton.jit
def tile_product(
    a, b, row, column, m, n, k, stride_am, stride_ak, stride_bk, stride_bn, begin, end,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    A_TRANSPOSED: tl.constexpr, B_TRANSPOSED: tl.constexpr, DESCRIPTORS: tl.constexpr, PRECISION: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Return the [BLOCK_M, BLOCK_N] tile of a @ b at (row, column), in float32.

    a, b: from `open_operand`. begin, end: steps of BLOCK_K along the inner axis; the whole axis has cdiv(k, BLOCK_K).
    PARTS: 0 for a and b themselves, else the matrices in each copy by `prepare_operands`.
    """
    c = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    small = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for step in range(begin, end):
        at = step * BLOCK_K
        x = load_operand(a, row, at, m, k, stride_am, stride_ak, BLOCK_M, BLOCK_K, DESCRIPTORS, A_TRANSPOSED)
        y = load_operand(b, at, column, k, n, stride_bk, stride_bn, BLOCK_K, BLOCK_N, DESCRIPTORS, B_TRANSPOSED)
        if PARTS == 0:
            c = add_product(c, x, y, PRECISION)
        elif PARTS == 1:
            c = tl.dot(x, y, c, input_precision="tf32")
        else:
            x_rest = load_operand(
                a, m + row, at, PARTS * m, k, stride_am, stride_ak, BLOCK_M, BLOCK_K, DESCRIPTORS, A_TRANSPOSED
            )
            y_rest = load_operand(
                b, at, n + column, k, PARTS * n, stride_bk, stride_bn, BLOCK_K, BLOCK_N, DESCRIPTORS, B_TRANSPOSED
            )
            small = tl.dot(x_rest, y, small, input_precision="tf32")
            small = tl.dot(x, y_rest, small, input_precision="tf32")
            c = add_separate_product(c, x, y, "tf32")
    if PARTS == 2:
        # A number that is not finite makes these sums NaN. They count as 0 then, and the big parts decide.
        c += tl.where(small == small, small, 0.0)
    return c


def stored_transposed(matrix: torch.Tensor) -> bool:
    """Return whether the matrix is stored column by column."""
    return matrix.stride(1) != 1 and matrix.stride(0) == 1


def operands_fit_descriptors(*operands: torch.Tensor) -> bool:
    """Return whether TMA can read every operand, as stored or transposed."""
    return all(fits_descriptor(x.T if stored_transposed(x) else x) for x in operands)


def programs_for_output(m: int, n: int, config: MatmulConfig, device: torch.device) -> int:
    """Return the number of programs to launch for an output [m, n]."""
    return programs_for_tiles(cdiv(m, config.block_m) * cdiv(n, config.block_n), config, device)


def programs_for_tiles(tiles: int, config: MatmulConfig, device: torch.device) -> int:
    """Return the number of programs to launch: one per tile, or fewer if the programs are persistent."""
    return min(tiles, config.programs * multiprocessors(device)) if config.descriptors else tiles
