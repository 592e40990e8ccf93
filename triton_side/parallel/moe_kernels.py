"""Kernels of a mixture of experts over ranks that `kernels/moe.py` has not.

A rank's rows come in blocks: those of its own tokens, then those of each peer. In a block they are sorted by expert.
offsets [blocks, experts + 1] has each expert's first row in each block, and the block's end.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from triton_side.calls.declare import Shapes, declare
from triton_side.kernels.moe import gradient_config, moe_activation_gradients_kernel
from triton_side.kernels.shared.grouped_gradient import load_group, open_groups
from triton_side.kernels.shared.launch import cdiv, device_of, next_power_of_2
from triton_side.kernels.shared.matmul_tiles import programs_for_tiles, store_tile, tile_at
from triton_side.kernels.shared.tiles import add_product, product_precision, provide_descriptor_memory


@declare(flops=lambda shapes: 0)  # the caller declares the operation
@triton.jit
def gather_rows_kernel(  # type: ignore[no-untyped-def]
    x_ptr, rows_ptr, out_ptr, width, stride, BLOCK: tl.constexpr
):
    """Copy the row that each slot holds."""
    slot = tl.program_id(0)
    row = tl.load(rows_ptr + slot).to(tl.int64)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < width
        tl.store(
            out_ptr + slot.to(tl.int64) * width + column, tl.load(x_ptr + row * stride + column, mask=inside),
            mask=inside,
        )


def block_gradient_flops(shapes: Shapes) -> float:
    rows, (m, n) = shapes["a_ptr"][0], shapes["c_ptr"][1:]
    return 2 * rows * m * n * (2 if "c2_ptr" in shapes else 1)


@declare(flops=block_gradient_flops)  # the caller declares the operation
@triton.jit
def block_gradients_kernel(  # type: ignore[no-untyped-def]
    a_ptr, b_ptr, b2_ptr, offsets_ptr, c_ptr, c2_ptr, blocks, experts, m, n,
    stride_ak, stride_am, stride_bk, stride_bn,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    DESCRIPTORS: tl.constexpr, PRECISION: tl.constexpr,
):
    """Compute c[e] = a^T b and c2[e] = a^T b2 over the rows of expert e in all blocks; without b2 only c."""
    a = open_groups(a_ptr, m, stride_ak, stride_am, BLOCK_K, BLOCK_M, False, DESCRIPTORS)
    b = open_groups(b_ptr, n, stride_bk, stride_bn, BLOCK_K, BLOCK_N, False, DESCRIPTORS)
    if c2_ptr is not None:
        b2 = open_groups(b2_ptr, n, stride_bk, stride_bn, BLOCK_K, BLOCK_N, False, DESCRIPTORS)
    tiles = tl.cdiv(m, BLOCK_M) * tl.cdiv(n, BLOCK_N)
    first = tl.program_id(0)
    # As in group_gradients_kernel: pointers have one program a tile, which takes fewer registers.
    stop, step = (experts * tiles, tl.num_programs(0)) if DESCRIPTORS else (first + 1, 1)
    for tile in tl.range(first, stop, step):
        expert = tile // tiles
        row, column = tile_at(tile % tiles, m, n, BLOCK_M, BLOCK_N, GROUP_M)
        c = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        if c2_ptr is not None:
            c2 = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for block in range(blocks):
            offsets = offsets_ptr + block * (experts + 1) + expert
            begin, end = tl.load(offsets), tl.load(offsets + 1)
            for slot in range(begin, end, BLOCK_K):
                x = load_group(
                    a, slot, begin, end, slot, row, m, stride_ak, stride_am, BLOCK_K, BLOCK_M, False, DESCRIPTORS
                ).T
                y = load_group(
                    b, slot, begin, end, slot, column, n, stride_bk, stride_bn, BLOCK_K, BLOCK_N, False, DESCRIPTORS
                )
                c = add_product(c, x, y, PRECISION)
                if c2_ptr is not None:
                    y2 = load_group(
                        b2, slot, begin, end, slot, column, n, stride_bk, stride_bn, BLOCK_K, BLOCK_N, False,
                        DESCRIPTORS,
                    )
                    c2 = add_product(c2, x, y2, PRECISION)
        matrix = tl.cast(expert, tl.int64) * m * n
        store_tile(c_ptr + matrix, c, row, column, m, n, BLOCK_M, BLOCK_N)
        if c2_ptr is not None:
            store_tile(c2_ptr + matrix, c2, row, column, m, n, BLOCK_M, BLOCK_N)


def launch_gather(x: Tensor, rows: Tensor, out: Tensor) -> None:
    """Write x[rows] to out [slots, width]; x has unit column stride."""
    width = x.shape[1]
    with device_of(x):
        gather_rows_kernel[(len(rows),)](
            x, rows, out, width, x.stride(0), BLOCK=min(next_power_of_2(width), 2048), num_warps=4
        )


def launch_block_gradients(
    a: Tensor, b: Tensor, offsets: Tensor, b2: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Return a^T b and, with b2, a^T b2 over each expert's rows: [experts, m, n]."""
    (blocks, ends), m, n = offsets.shape, a.shape[1], b.shape[1]
    experts = ends - 1
    config = gradient_config(a, b, accumulators=1 if b2 is None else 2)
    c = torch.empty((experts, m, n), dtype=a.dtype, device=a.device)
    c2 = None if b2 is None else torch.empty_like(c)
    if not len(a):
        return c.zero_(), None if c2 is None else c2.zero_()
    tiles = experts * cdiv(m, config.block_m) * cdiv(n, config.block_n)
    with device_of(a):
        if config.descriptors:
            provide_descriptor_memory(a.device)
        block_gradients_kernel[(programs_for_tiles(tiles, config, a.device),)](
            a, b, b2, offsets, c, c2, blocks, experts, m, n, *a.stride(), *b.stride(),
            BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k, GROUP_M=config.group_m,
            DESCRIPTORS=config.descriptors, PRECISION=product_precision(a.dtype),
            num_warps=config.num_warps, num_stages=config.num_stages,
        )
    return c, c2


def launch_activation_gradients(
    dout: Tensor, gate: Tensor, up: Tensor, weights: Tensor, dgate: Tensor, dup: Tensor, weighted_act: Tensor,
    dweights: Tensor,
) -> None:
    """Fill dgate, dup and weighted_act [rows, hidden] and dweights [rows]; weights [rows] are those of the rows."""
    rows, hidden = dout.shape
    if not rows:
        return
    own_row = torch.arange(rows, dtype=torch.int32, device=dout.device)
    with device_of(dout):
        moe_activation_gradients_kernel[(rows,)](
            dout, gate, up, own_row, weights, dgate, dup, weighted_act, dweights, hidden,
            BLOCK=min(next_power_of_2(hidden), 1024), num_warps=4,
        )
