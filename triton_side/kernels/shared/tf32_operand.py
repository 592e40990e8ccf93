"""Operands of float32 products on the tensor cores, stored as `wgmma` reads them.

A Hopper GPU's `wgmma` reads TF32 operands from shared memory only along the inner axis, and drops the 13 low bits. An
operand of another form passes through registers in each step of the loop, and the tensor cores wait for it. So a kernel
first writes a copy of each operand, a row by row and b column by column. For b [k, n]:

    TF32            [n, k]: b rounded to TF32
    TF32, 3 times   [2 n, k]: `big`, b rounded to TF32, then `rest`, b - big

    a b = a_big b_big + a_big b_rest + a_rest b_big + a_rest b_rest

The last product is left out: it is below 2^-22 of a b.
"""

import math

import torch
import triton
import triton.language as tl

from xlafuse.triton_side.calls.declare import declare, forward, preparing
from xlafuse.triton_side.kernels.shared.launch import cdiv, device_of
from xlafuse.triton_side.kernels.shared.matmul_tiles import load_strided_tile
from xlafuse.triton_side.kernels.shared.tiles import DESCRIPTOR_ALIGNMENT, fits_descriptor, round_to_tf32, split_tf32

PARTS = {"tf32": 1, "tf32x3": 2}  # matrices in a copy, by precision


@declare(forward("convert", "product", "operand"), flops=lambda shapes: math.prod(shapes["b_ptr"]))
@triton.jit
def prepare_operand_kernel(
    b_ptr, prepared_ptr, k, n, stride_bk, stride_bn, stride_pn, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Store ROWS columns of b to rows of the copy, and their rest n rows below."""
    tiles = tl.cdiv(k, COLUMNS)
    row, column = tl.program_id(0) // tiles * ROWS, tl.program_id(0) % tiles * COLUMNS
    b = load_strided_tile(b_ptr, row, column, n, k, stride_bn, stride_bk, ROWS, COLUMNS)
    r, c = row + tl.arange(0, ROWS)[:, None], column + tl.arange(0, COLUMNS)[None, :]
    inside = (r < n) & (c < k)
    prepared_ptr += r.to(tl.int64) * stride_pn + c
    if PARTS == 1:
        tl.store(prepared_ptr, round_to_tf32(b), mask=inside)
    else:
        big, rest = split_tf32(b)
        tl.store(prepared_ptr, big, mask=inside)
        tl.store(prepared_ptr + tl.cast(n, tl.int64) * stride_pn, rest, mask=inside)


def prepare_operands(
    a: torch.Tensor, b: torch.Tensor, precision: str, a_is_tf32: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the copies of a [m, k] and b [k, n] for TMA: as [m, k], row by row, and [k, n], column by column.

    For "tf32x3" they are [2 m, k] and [k, 2 n]. a itself serves in TF32 if it is rounded already (`a_is_tf32`) and
    stored row by row.
    """
    as_it_is = a_is_tf32 and precision == "tf32" and fits_descriptor(a)
    return a if as_it_is else _prepared(a.T, precision, "a").T, _prepared(b, precision, "b")


def _prepared(b: torch.Tensor, precision: str, name: str) -> torch.Tensor:
    (k, n), parts, grain = b.shape, PARTS[precision], DESCRIPTOR_ALIGNMENT // b.element_size()
    prepared = torch.empty((parts * n, grain * cdiv(k, grain)), dtype=b.dtype, device=b.device)
    tile = 64
    with device_of(b), preparing("convert", b_ptr=name, prepared_ptr=f"prepared_{name}"):
        prepare_operand_kernel[(cdiv(n, tile) * cdiv(k, tile),)](
            b, prepared, k, n, *b.stride(), prepared.stride(0), ROWS=tile, COLUMNS=tile, PARTS=parts, num_warps=4
        )
    return prepared[:, :k].T
