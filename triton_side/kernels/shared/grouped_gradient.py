"""Gradients of the matrices of a grouped product (`grouped_product.py`): for each expert a product over its slots.

    c[e] = sum over the slots s of e of a[rows[s]]^T b[s]

`rows` may gather either operand, or neither; c2 is the same product with b2. Pointers read gathered rows. TMA reads
sorted rows whose strides allow it. A group may end within a step of the inner axis, and rows past its end must read as
zero. TMA reads zeros past a tensor's end, so `triton.tools.ragged_tma` makes each group end there. The gradient of a
group without rows is zero.

Shapes: a, b, b2 [slots, m or n], the gathered one [rows, m or n], rows [slots], offsets [experts + 1], c [experts, m,
n]. dtypes as in `grouped_product.py`.
"""

import torch
import triton
import triton.language as tl
from triton.tools.ragged_tma import load_ragged

from xlafuse.triton_side.calls.declare import Shapes, declare
from xlafuse.triton_side.kernels.shared.grouped_product import load_gathered_rows, rows_in_slots
from xlafuse.triton_side.kernels.shared.launch import cdiv, device_of
from xlafuse.triton_side.kernels.shared.matmul_tiles import MatmulConfig, programs_for_tiles, store_tile, tile_at
from xlafuse.triton_side.kernels.shared.tiles import add_product, product_precision, provide_descriptor_memory


@triton.jit
def open_groups(
    pointer, columns, stride_row, stride_column,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, GATHERS: tl.constexpr, DESCRIPTOR: tl.constexpr,
):
    """Return the source, a descriptor or a pointer, from which `load_group` reads [slots, columns]."""
    if DESCRIPTOR and not GATHERS:
        # The descriptor that `ragged_tma.create_ragged_descriptor` makes on the host: 2^30 rows that end with the
        # group. Two more axes reach any group's start, because the sum of their offsets wraps around in 64 bits.
        stride = tl.cast(stride_row, tl.int64)
        return tl.make_tensor_descriptor(
            pointer, [0x7FFF0000, 0x7FFF0000, 2**30, columns], [2**34 - stride, stride, stride, 1],
            [1, 1, ROWS, COLUMNS],
        )
    else:
        return pointer


@triton.jit
def load_group(
    source, gathered, begin, end, slot, at, columns, stride_row, stride_column,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, GATHERS: tl.constexpr, DESCRIPTOR: tl.constexpr,
):
    """Return the [ROWS, COLUMNS] tile at (slot, at), zero outside the group begin .. end.

    Its rows are those `gathered`, or the slots themselves.
    """
    if DESCRIPTOR and not GATHERS:
        return load_ragged(source, begin, end - begin, [slot - begin, at])
    else:
        slots = slot + tl.arange(0, ROWS)
        row = gathered if GATHERS else slots.to(tl.int64)
        return load_gathered_rows(source, row, slots < end, at, columns, stride_row, stride_column, COLUMNS)


def gradient_flops(shapes: Shapes) -> float:
    slots, (m, n) = max(shapes["a_ptr"][0], shapes["b_ptr"][0]), shapes["c_ptr"][1:]
    return 2 * slots * m * n * (2 if "c2_ptr" in shapes else 1)


@declare(flops=gradient_flops)  # the caller declares the operation
@triton.jit
def group_gradients_kernel(
    a_ptr, b_ptr, b2_ptr, rows_ptr, offsets_ptr, c_ptr, c2_ptr, experts, m, n,
    stride_ak, stride_am, stride_bk, stride_bn,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    A_GATHERED: tl.constexpr, DESCRIPTORS: tl.constexpr, PRECISION: tl.constexpr, BLOCKS: tl.constexpr,
):
    """Compute c[e] = a^T b and c2[e] = a^T b2 over the slots of e, in their order.

    offsets [BLOCKS, experts + 1]: each expert's first slot in each block of slots, and the block's end. a is gathered,
    or b if not A_GATHERED; without rows neither is. Without b2 there is no second product.
    """
    A_GATHERS: tl.constexpr = rows_ptr is not None and A_GATHERED
    B_GATHERS: tl.constexpr = rows_ptr is not None and not A_GATHERED
    a = open_groups(a_ptr, m, stride_ak, stride_am, BLOCK_K, BLOCK_M, A_GATHERS, DESCRIPTORS)
    b = open_groups(b_ptr, n, stride_bk, stride_bn, BLOCK_K, BLOCK_N, B_GATHERS, DESCRIPTORS)
    if c2_ptr is not None:
        b2 = open_groups(b2_ptr, n, stride_bk, stride_bn, BLOCK_K, BLOCK_N, B_GATHERS, DESCRIPTORS)
    tiles = tl.cdiv(m, BLOCK_M) * tl.cdiv(n, BLOCK_N)
    first = tl.program_id(0)
    # Pointers have one program a tile. A loop of unknown length would take 45 to 100 more registers (Triton 3.7).
    stop, step = (experts * tiles, tl.num_programs(0)) if DESCRIPTORS else (first + 1, 1)
    for tile in tl.range(first, stop, step):
        expert = tile // tiles
        row, column = tile_at(tile % tiles, m, n, BLOCK_M, BLOCK_N, GROUP_M)
        c = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        if c2_ptr is not None:
            c2 = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for block in tl.static_range(BLOCKS):
            first_ptr = offsets_ptr + block * (experts + 1) + expert
            begin, end = tl.load(first_ptr), tl.load(first_ptr + 1)
            for slot in range(begin, end, BLOCK_K):
                gathered = rows_in_slots(rows_ptr, slot + tl.arange(0, BLOCK_K), end)
                x = load_group(
                    a, gathered, begin, end, slot, row, m, stride_ak, stride_am, BLOCK_K, BLOCK_M, A_GATHERS,
                    DESCRIPTORS,
                ).T
                y = load_group(
                    b, gathered, begin, end, slot, column, n, stride_bk, stride_bn, BLOCK_K, BLOCK_N, B_GATHERS,
                    DESCRIPTORS,
                )
                c = add_product(c, x, y, PRECISION)
                if c2_ptr is not None:
                    y2 = load_group(
                        b2, gathered, begin, end, slot, column, n, stride_bk, stride_bn, BLOCK_K, BLOCK_N, B_GATHERS,
                        DESCRIPTORS,
                    )
                    c2 = add_product(c2, x, y2, PRECISION)
        matrix = tl.cast(expert, tl.int64) * m * n
        store_tile(c_ptr + matrix, c, row, column, m, n, BLOCK_M, BLOCK_N)
        if c2_ptr is not None:
            store_tile(c2_ptr + matrix, c2, row, column, m, n, BLOCK_M, BLOCK_N)


def launch_group_gradients(
    a: torch.Tensor, b: torch.Tensor, rows: torch.Tensor | None, offsets: torch.Tensor, config: MatmulConfig,
    *, a_gathered: bool, b2: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return a^T b and, with b2, a^T b2 over the slots of each expert: [experts, m, n].

    offsets: [experts + 1], or [blocks, experts + 1] where each block of slots has the experts in order. `rows` gathers
    the rows of a if a_gathered, else of b; without rows neither is gathered. b2 has b's strides.
    """
    experts, m, n = offsets.shape[-1] - 1, a.shape[1], b.shape[1]
    c = torch.empty((experts, m, n), dtype=a.dtype, device=a.device)
    c2 = None if b2 is None else torch.empty_like(c)
    tiles = experts * cdiv(m, config.block_m) * cdiv(n, config.block_n)
    with device_of(a):
        if config.descriptors:
            provide_descriptor_memory(a.device)
        group_gradients_kernel[(programs_for_tiles(tiles, config, a.device),)](
            a, b, b2, rows, offsets, c, c2, experts, m, n, *a.stride(), *b.stride(),
            BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k, GROUP_M=config.group_m,
            A_GATHERED=a_gathered, DESCRIPTORS=config.descriptors, PRECISION=product_precision(a.dtype),
            BLOCKS=len(offsets) if offsets.ndim == 2 else 1,
            num_warps=config.num_warps, num_stages=config.num_stages,
        )
    return c, c2
