"""Products of groups of rows with one matrix each, as in a mixture of experts. Gradients are in `grouped_gradient.py`.

Slot s of the operand sorted by expert belongs to expert e if offsets[e] <= s < offsets[e + 1].

    c[s] = a[rows[s]] @ b[e]  (+ a2[s] @ b2[e])

rows[s] is the row of the unsorted matrix that slot s holds; a sorted copy needs none. Only the GPU knows the sizes of
the groups, and nothing waits for it. A program finds its tile's expert in the offsets, and the grid has the largest
possible number of tiles: one more for each expert than without groups. A group without rows has no tile.

TMA reads weights and sorted rows whose strides allow it. A tile's last rows may belong to the next group; they are
computed and not stored. Pointers read gathered rows, because Hopper's TMA cannot gather.

Shapes: a [rows, k] or [slots, k], rows [slots], b [experts, k, n], offsets [experts + 1], c [slots, n]. dtypes:
bfloat16, float16, float32, one for all; rows and offsets int32; products accumulate in float32.
"""

import math

import torch
import triton
import triton.language as tl

from xlafuse.triton_side.calls.declare import Shapes, declare
from xlafuse.triton_side.kernels.shared.launch import cdiv, device_of, next_power_of_2
from xlafuse.triton_side.kernels.shared.matmul_tiles import (
    MatmulConfig,
    load_strided_tile,
    open_operand,
    programs_for_tiles,
    store_tile,
    tile_at,
)
from xlafuse.triton_side.kernels.shared.tiles import (
    add_product,
    fits_descriptor,
    product_precision,
    provide_descriptor_memory,
)


@triton.jit
def cumulative_tiles(offsets_ptr, experts, BLOCK_M: tl.constexpr, EXPERTS: tl.constexpr):
    """Return, for each expert, the number of tiles of rows that it and all experts before it have."""
    expert = tl.arange(0, EXPERTS)
    begin = tl.load(offsets_ptr + expert, mask=expert < experts, other=0)
    end = tl.load(offsets_ptr + expert + 1, mask=expert < experts, other=0)
    return tl.cumsum(tl.cdiv(end - begin, BLOCK_M), axis=0)


@triton.jit
def group_of_tile(row_tile, tiles, offsets_ptr, BLOCK_M: tl.constexpr, EXPERTS: tl.constexpr):
    """Return (expert, first row, end of the expert's rows) of a tile of rows."""
    expert = tl.sum((tiles <= row_tile).to(tl.int32), axis=0)
    # Cumulative sums never fall, so the largest earlier one belongs to the expert before.
    before = tl.max(tl.where(tl.arange(0, EXPERTS) < expert, tiles, 0), axis=0)
    begin = tl.load(offsets_ptr + expert)
    return expert, begin + (row_tile - before) * BLOCK_M, tl.load(offsets_ptr + expert + 1)


@triton.jit
def open_experts(
    pointer, experts, rows, columns, stride_expert, stride_row, stride_column,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DESCRIPTOR: tl.constexpr, TRANSPOSED: tl.constexpr,
):
    """Return the source from which `load_expert` reads [experts, rows, columns].

    TRANSPOSED: each matrix is stored column by column.
    """
    if DESCRIPTOR:
        if TRANSPOSED:
            return tl.make_tensor_descriptor(
                pointer, [experts, columns, rows], [stride_expert, stride_column, 1], [1, COLUMNS, ROWS]
            )
        else:
            return tl.make_tensor_descriptor(
                pointer, [experts, rows, columns], [stride_expert, stride_row, 1], [1, ROWS, COLUMNS]
            )
    else:
        return pointer


@triton.jit
def load_expert(
    source, expert, row, column, rows, columns, stride_expert, stride_row, stride_column,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DESCRIPTOR: tl.constexpr, TRANSPOSED: tl.constexpr,
):
    """Return the [ROWS, COLUMNS] tile at (row, column) of an expert's matrix, zero outside it."""
    if DESCRIPTOR:
        if TRANSPOSED:
            return source.load([expert, column, row]).reshape(COLUMNS, ROWS).T
        else:
            return source.load([expert, row, column]).reshape(ROWS, COLUMNS)
    else:
        matrix = source + tl.cast(expert, tl.int64) * stride_expert
        return load_strided_tile(matrix, row, column, rows, columns, stride_row, stride_column, ROWS, COLUMNS)


@triton.jit
def rows_in_slots(rows_ptr, slot, end):
    """Return the row of the unsorted matrix that each slot holds; the slot itself without rows."""
    if rows_ptr is not None:
        return tl.load(rows_ptr + slot, mask=slot < end, other=0).to(tl.int64)
    else:
        return slot.to(tl.int64)


@triton.jit
def load_gathered_rows(pointer, row, inside, column, columns, stride_row, stride_column, COLUMNS: tl.constexpr):
    """Return COLUMNS columns of the given rows, zero outside."""
    c = tl.arange(0, COLUMNS)[None, :]
    pointers = (pointer + tl.cast(column, tl.int64) * stride_column) + (row * stride_row)[:, None] + c * stride_column
    return tl.load(pointers, mask=inside[:, None] & (c < columns - column), other=0.0)


@triton.jit
def load_slots(
    source, gathered, row, at, end, k, stride_row, stride_column,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, GATHERS: tl.constexpr, DESCRIPTOR: tl.constexpr,
):
    """Return the [ROWS, COLUMNS] tile of a's rows: those `gathered`, or those from slot `row` on."""
    if GATHERS:
        inside = row + tl.arange(0, ROWS) < end
        return load_gathered_rows(source, gathered, inside, at, k, stride_row, stride_column, COLUMNS)
    elif DESCRIPTOR:
        return source.load([row, at])
    else:
        return load_strided_tile(source, row, at, end, k, stride_row, stride_column, ROWS, COLUMNS)


@triton.jit
def open_slots(
    pointer, slots, k, stride_row, stride_column,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, GATHERS: tl.constexpr, DESCRIPTOR: tl.constexpr,
):
    """Return the source, a descriptor or a pointer, from which `load_slots` reads a."""
    if GATHERS:
        return pointer
    else:
        return open_operand(pointer, slots, k, stride_row, stride_column, ROWS, COLUMNS, DESCRIPTOR, False)


def product_flops(shapes: Shapes) -> float:
    """Return the FLOPs of one product a slot, or of two.

    There are two with b and b2 for the same rows of a (c2 or activated), and with a second pair (a2).
    """
    slots, n = shapes["c_ptr" if "c_ptr" in shapes else "activated_ptr"]
    k = math.prod(shapes["b_ptr"][1:]) // n
    return 2 * slots * n * k * (2 if "b2_ptr" in shapes else 1) + (6 * slots * n if "activated_ptr" in shapes else 0)


@declare(flops=product_flops)  # the caller declares the operation
@triton.jit
def grouped_product_kernel(
    a_ptr, rows_ptr, b_ptr, a2_ptr, b2_ptr, offsets_ptr, c_ptr, experts, slots, n, k,
    stride_am, stride_ak, stride_be, stride_bk, stride_bn,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, EXPERTS: tl.constexpr,
    B_TRANSPOSED: tl.constexpr, DESCRIPTORS: tl.constexpr, PRECISION: tl.constexpr,
):
    """Compute c = a[rows] @ b (+ a2 @ b2) group by group; without rows a's own rows, without a2 no second product.

    a2 and b2 have the strides of a and b.
    """
    GATHERS: tl.constexpr = rows_ptr is not None
    a = open_slots(a_ptr, slots, k, stride_am, stride_ak, BLOCK_M, BLOCK_K, GATHERS, DESCRIPTORS)
    b = open_experts(
        b_ptr, experts, k, n, stride_be, stride_bk, stride_bn, BLOCK_K, BLOCK_N, DESCRIPTORS, B_TRANSPOSED
    )
    if a2_ptr is not None:
        a2 = open_slots(a2_ptr, slots, k, stride_am, stride_ak, BLOCK_M, BLOCK_K, GATHERS, DESCRIPTORS)
        b2 = open_experts(
            b2_ptr, experts, k, n, stride_be, stride_bk, stride_bn, BLOCK_K, BLOCK_N, DESCRIPTORS, B_TRANSPOSED
        )
    tiles = cumulative_tiles(offsets_ptr, experts, BLOCK_M, EXPERTS)
    row_tiles = tl.max(tiles, axis=0)
    # A flattened loop loads the next tile before it stores this one. Two inner loops cannot be flattened.
    FLATTEN: tl.constexpr = DESCRIPTORS and a2_ptr is None and not GATHERS
    for tile in tl.range(tl.program_id(0), row_tiles * tl.cdiv(n, BLOCK_N), tl.num_programs(0), flatten=FLATTEN):
        row, column = tile_at(tile, row_tiles * BLOCK_M, n, BLOCK_M, BLOCK_N, GROUP_M)
        expert, row, end = group_of_tile(row // BLOCK_M, tiles, offsets_ptr, BLOCK_M, EXPERTS)
        gathered = rows_in_slots(rows_ptr, row + tl.arange(0, BLOCK_M), end)
        c = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for step in range(tl.cdiv(k, BLOCK_K)):
            at = step * BLOCK_K
            x = load_slots(
                a, gathered, row, at, end, k, stride_am, stride_ak, BLOCK_M, BLOCK_K, GATHERS, DESCRIPTORS
            )
            y = load_expert(
                b, expert, at, column, k, n, stride_be, stride_bk, stride_bn, BLOCK_K, BLOCK_N, DESCRIPTORS,
                B_TRANSPOSED,
            )
            c = add_product(c, x, y, PRECISION)
        if a2_ptr is not None:
            for step in range(tl.cdiv(k, BLOCK_K)):
                at = step * BLOCK_K
                x = load_slots(
                    a2, gathered, row, at, end, k, stride_am, stride_ak, BLOCK_M, BLOCK_K, GATHERS, DESCRIPTORS
                )
                y = load_expert(
                    b2, expert, at, column, k, n, stride_be, stride_bk, stride_bn, BLOCK_K, BLOCK_N, DESCRIPTORS,
                    B_TRANSPOSED,
                )
                c = add_product(c, x, y, PRECISION)
        store_tile(c_ptr, c, row, column, end, n, BLOCK_M, BLOCK_N)


@declare(flops=product_flops)  # the caller declares the operation
@triton.jit
def grouped_gate_up_kernel(
    a_ptr, rows_ptr, b_ptr, b2_ptr, offsets_ptr, c_ptr, c2_ptr, activated_ptr, experts, slots, n, k,
    stride_am, stride_ak, stride_be, stride_bk, stride_bn,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, EXPERTS: tl.constexpr,
    B_TRANSPOSED: tl.constexpr, DESCRIPTORS: tl.constexpr, PRECISION: tl.constexpr,
):
    """Compute c = a[rows] @ b and c2 = a[rows] @ b2 group by group in one pass over a, and silu(c) * c2.

    A result whose pointer is None is not stored.
    """
    GATHERS: tl.constexpr = rows_ptr is not None
    a = open_slots(a_ptr, slots, k, stride_am, stride_ak, BLOCK_M, BLOCK_K, GATHERS, DESCRIPTORS)
    b = open_experts(
        b_ptr, experts, k, n, stride_be, stride_bk, stride_bn, BLOCK_K, BLOCK_N, DESCRIPTORS, B_TRANSPOSED
    )
    b2 = open_experts(
        b2_ptr, experts, k, n, stride_be, stride_bk, stride_bn, BLOCK_K, BLOCK_N, DESCRIPTORS, B_TRANSPOSED
    )
    tiles = cumulative_tiles(offsets_ptr, experts, BLOCK_M, EXPERTS)
    row_tiles = tl.max(tiles, axis=0)
    for tile in tl.range(tl.program_id(0), row_tiles * tl.cdiv(n, BLOCK_N), tl.num_programs(0)):
        row, column = tile_at(tile, row_tiles * BLOCK_M, n, BLOCK_M, BLOCK_N, GROUP_M)
        expert, row, end = group_of_tile(row // BLOCK_M, tiles, offsets_ptr, BLOCK_M, EXPERTS)
        gathered = rows_in_slots(rows_ptr, row + tl.arange(0, BLOCK_M), end)
        c = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        c2 = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for step in range(tl.cdiv(k, BLOCK_K)):
            at = step * BLOCK_K
            x = load_slots(
                a, gathered, row, at, end, k, stride_am, stride_ak, BLOCK_M, BLOCK_K, GATHERS, DESCRIPTORS
            )
            y = load_expert(
                b, expert, at, column, k, n, stride_be, stride_bk, stride_bn, BLOCK_K, BLOCK_N, DESCRIPTORS,
                B_TRANSPOSED,
            )
            y2 = load_expert(
                b2, expert, at, column, k, n, stride_be, stride_bk, stride_bn, BLOCK_K, BLOCK_N, DESCRIPTORS,
                B_TRANSPOSED,
            )
            c = add_product(c, x, y, PRECISION)
            c2 = add_product(c2, x, y2, PRECISION)
        # Stored first; after the products 64 bytes a thread would spill (bfloat16, Triton 3.7).
        store_tile(activated_ptr, c * tl.sigmoid(c) * c2, row, column, end, n, BLOCK_M, BLOCK_N)
        if c_ptr is not None:
            store_tile(c_ptr, c, row, column, end, n, BLOCK_M, BLOCK_N)
            store_tile(c2_ptr, c2, row, column, end, n, BLOCK_M, BLOCK_N)


def experts_block(experts: int) -> int:
    """Return a power of two that holds the experts and that a product accepts as an axis."""
    return max(16, next_power_of_2(experts))


def _stored_transposed(weights: torch.Tensor) -> bool:
    return weights.stride(2) != 1 and weights.stride(1) == 1


def fit_descriptors(*operands: torch.Tensor) -> bool:
    """Return whether TMA can read weights [experts, k, n], as stored or transposed, and rows [slots, k]."""
    stored = (each.mT if each.dim() == 3 and _stored_transposed(each) else each for each in operands)
    return all(map(fits_descriptor, stored))


def _grid(slots: int, n: int, experts: int, config: MatmulConfig, device: torch.device) -> tuple[int]:
    """Return a grid for the largest number of tiles that there can be."""
    tiles = (cdiv(slots, config.block_m) + experts) * cdiv(n, config.block_n)
    return (programs_for_tiles(tiles, config, device),)


def launch_grouped_product(
    a: torch.Tensor, rows: torch.Tensor | None, b: torch.Tensor, offsets: torch.Tensor, slots: int,
    config: MatmulConfig, second: tuple[torch.Tensor, torch.Tensor] | None = None, out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return c [slots, n] = a[rows] @ b, or a @ b without rows, group by group.

    second: (a2, b2), with the strides of a and b, whose product is added. out: contiguous memory for c.
    """
    experts, k, n = b.shape
    c = torch.empty((slots, n), dtype=a.dtype, device=a.device) if out is None else out
    a2, b2 = second or (None, None)
    with device_of(a):
        if config.descriptors:
            provide_descriptor_memory(a.device)
        grouped_product_kernel[_grid(slots, n, experts, config, a.device)](
            a, rows, b, a2, b2, offsets, c, experts, slots, n, k, *a.stride(), *b.stride(),
            BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k, GROUP_M=config.group_m,
            EXPERTS=experts_block(experts), B_TRANSPOSED=_stored_transposed(b), DESCRIPTORS=config.descriptors,
            PRECISION=product_precision(a.dtype), num_warps=config.num_warps, num_stages=config.num_stages,
        )
    return c


def launch_gate_up(
    x: torch.Tensor, rows: torch.Tensor | None, w_gate: torch.Tensor, w_up: torch.Tensor, offsets: torch.Tensor,
    config: MatmulConfig, save: bool,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Return silu(x[rows] w_gate) * (x[rows] w_up) group by group and, with `save`, the two products; [slots, hidden].

    Without rows it takes x's own rows. The two weights have the same strides.
    """
    experts, width, hidden = w_gate.shape
    slots = len(x if rows is None else rows)
    act = torch.empty((slots, hidden), dtype=x.dtype, device=x.device)
    gate, up = (torch.empty_like(act), torch.empty_like(act)) if save else (None, None)
    with device_of(x):
        if config.descriptors:
            provide_descriptor_memory(x.device)
        grouped_gate_up_kernel[_grid(slots, hidden, experts, config, x.device)](
            x, rows, w_gate, w_up, offsets, gate, up, act, experts, slots, hidden, width, *x.stride(), *w_gate.stride(),
            BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k, GROUP_M=config.group_m,
            EXPERTS=experts_block(experts), B_TRANSPOSED=_stored_transposed(w_gate), DESCRIPTORS=config.descriptors,
            PRECISION=product_precision(x.dtype), num_warps=config.num_warps, num_stages=config.num_stages,
        )
    return act, gate, up
