"""Kernels of a mixture of experts over ranks that `kernels/moe.py` has not.

A rank's rows come in blocks: those of its own tokens, then those of each peer. In a block they are sorted by expert.
offsets [blocks, experts + 1] has each expert's first row in each block, and the block's end.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from xlafuse.triton_side.calls.declare import declare
from xlafuse.triton_side.kernels.moe import gradient_config, moe_activation_gradients_kernel
from xlafuse.triton_side.kernels.shared.grouped_gradient import launch_group_gradients
from xlafuse.triton_side.kernels.shared.launch import device_of, next_power_of_2


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
    if len(a):
        config = gradient_config(a, b, accumulators=1 if b2 is None else 2)
        return launch_group_gradients(a, b, None, offsets, config, a_gathered=False, b2=b2)
    none = a.new_zeros(offsets.shape[1] - 1, a.shape[1], b.shape[1])
    return none, None if b2 is None else none.clone()


@cache
def _numbers(count: int, device: torch.device) -> Tensor:
    return torch.arange(count, dtype=torch.int32, device=device)


def launch_activation_gradients(
    dout: Tensor, gate: Tensor, up: Tensor, weights: Tensor, dgate: Tensor, dup: Tensor, weighted_act: Tensor,
    dweights: Tensor,
) -> None:
    """Fill dgate, dup and weighted_act [rows, hidden] and dweights [rows]; weights [rows] are those of the rows."""
    rows, hidden = dout.shape
    if not rows:
        return
    own_row = _numbers(next_power_of_2(rows), dout.device)
    with device_of(dout):
        moe_activation_gradients_kernel[(rows,)](
            dout, gate, up, own_row, weights, dgate, dup, weighted_act, dweights, hidden,
            BLOCK=min(next_power_of_2(hidden), 1024), num_warps=4,
        )
