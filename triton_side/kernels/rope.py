"""Rotary position embedding of queries and keys in one launch, forward and backward.

    out = [x1 cos - x2 sin, x2 cos + x1 sin]      x1, x2: the halves of a head
    angle of pair i = position * theta^(-2i/head_dim)

Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", arXiv:2104.09864; halves as Llama pairs
them. Shapes: q, q_out [batch, heads, sequence, head_dim], k, k_out [batch, kv_heads, sequence, head_dim], positions
[batch, sequence]. bfloat16, float16 or float32 in and out; fp32 inside. The backward pass is the same kernel with
the angle negated. It reads positions and the gradients; only positions are saved.

The launcher can also rotate in place, or into views of a larger tensor, because a pair is read before it is written.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from triton_side.calls import declare
from triton_side.kernels.shared.launch import (
    cdiv,
    check_tensors,
    device_of,
    multiprocessors,
    next_power_of_2,
    with_unit_column_stride,
)

# Operations as the plain block writes them; the backward pass computes the angles again.
ROTATIONS = [
    (stage, op, result)
    for stage in ("rotate_q", "rotate_k")
    for op, result in (("mul", "cos"), ("mul", "sin"), ("sub", "first"), ("add", "second"))
]
ANGLES = [("pow", "frequency"), ("mul", "angle"), ("cos", "cos"), ("sin", "sin")]
FORWARD = (
    *(declare.forward(op, "angles", result) for op, result in ANGLES),
    *(declare.forward(op, stage, result) for stage, op, result in ROTATIONS),
)
BACKWARD = (
    *(declare.again(op, "angles", result) for op, result in ANGLES),
    *(declare.gradient(op, stage, result) for stage, op, result in ROTATIONS),
)


@dataclass(frozen=True)
class RopeConfig:
    """Launch configuration: a program has `rows` positions and takes `heads` heads of them at a time, queries' first.

    Both are powers of two; `splits` programs share a tile's heads.
    """

    rows: int
    heads: int
    splits: int
    num_warps: int


def rope_flops(shapes: declare.Shapes) -> float:
    """Return two products and a sum an element, and angle, cosine and sine for each pair and position."""
    rotated = math.prod(shapes["q_ptr"]) + math.prod(shapes["k_ptr"])
    return 3 * rotated + 3 * math.prod(shapes["positions_ptr"]) * shapes["q_ptr"][-1] / 2


@triton.jit
def _heads(x, first, at, HEADS: tl.constexpr):
    """Return pointers to the first halves of HEADS heads from `first` on, [heads, rows, pairs], and their mask.

    x: (pointer, strides of batch, head and position, number of heads). at: (batch, position, pair, mask) of the tile.
    """
    x_ptr, stride_batch, stride_head, stride_position, heads = x
    batch, position, pair, mask = at
    head = (first + tl.arange(0, HEADS)).to(tl.int64)[:, None, None]
    pointers = x_ptr + batch * stride_batch + head * stride_head + position * stride_position + pair
    return pointers, mask & (head < heads)


@triton.jit
def _load_group(q, k, group, at, HALF: tl.constexpr, HEADS: tl.constexpr):
    """Return both halves of a group's heads; zeros past the last group."""
    q_groups = tl.cdiv(q[4], HEADS)
    if group < q_groups:
        pointers, mask = _heads(q, group * HEADS, at, HEADS)
        x1 = tl.load(pointers, mask=mask, other=0.0)
        x2 = tl.load(pointers + HALF, mask=mask, other=0.0)
    else:
        pointers, mask = _heads(k, (group - q_groups) * HEADS, at, HEADS)
        x1 = tl.load(pointers, mask=mask, other=0.0)
        x2 = tl.load(pointers + HALF, mask=mask, other=0.0)
    return x1, x2


@triton.jit
def _store_rotated(x1, x2, out, first, at, cos, sin, HALF: tl.constexpr, HEADS: tl.constexpr):
    """Rotate by angles [1, rows, pairs], and store HEADS heads from `first` on."""
    x1, x2 = x1.to(tl.float32), x2.to(tl.float32)
    pointers, mask = _heads(out, first, at, HEADS)
    tl.store(pointers, (x1 * cos - x2 * sin).to(out[0].dtype.element_ty), mask=mask)
    tl.store(pointers + HALF, (x2 * cos + x1 * sin).to(out[0].dtype.element_ty), mask=mask)


@declare.declare(flops=rope_flops)  # the caller declares the operations of either pass
@triton.jit
def rope_kernel(
    q_ptr, k_ptr, positions_ptr, q_out_ptr, k_out_ptr,
    q_stride_batch, q_stride_head, q_stride_position, k_stride_batch, k_stride_head, k_stride_position,
    q_out_stride_batch, q_out_stride_head, q_out_stride_position,
    k_out_stride_batch, k_out_stride_head, k_out_stride_position, heads, kv_heads, rows, sequence,
    HALF: tl.constexpr, EXPONENT: tl.constexpr, BACKWARD: tl.constexpr,
    ROWS: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr,
):
    """Rotate the heads of ROWS rows, which are the positions of all sequences, one sequence after another."""
    q = (q_ptr, q_stride_batch, q_stride_head, q_stride_position, heads)
    k = (k_ptr, k_stride_batch, k_stride_head, k_stride_position, kv_heads)
    q_out = (q_out_ptr, q_out_stride_batch, q_out_stride_head, q_out_stride_position, heads)
    k_out = (k_out_ptr, k_out_stride_batch, k_out_stride_head, k_out_stride_position, kv_heads)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    pair = tl.arange(0, PAIRS)
    batch = (row // sequence).to(tl.int64)[None, :, None]
    position = (row % sequence).to(tl.int64)[None, :, None]
    at = (batch, position, pair[None, None, :], (row < rows)[None, :, None] & (pair < HALF)[None, None, :])
    # The first heads are on their way while the angles are computed, and the next heads while these are rotated.
    x1, x2 = _load_group(q, k, tl.program_id(1), at, HALF, HEADS)

    # The position multiplies a frequency's error. exp2 in float64, once a pair, is right to float32's last place; exp2
    # in float32 is not.
    frequency = tl.exp2(pair.to(tl.float64) * EXPONENT).to(tl.float32)
    angle = tl.load(positions_ptr + row, mask=row < rows, other=0).to(tl.float32)[:, None] * frequency[None, :]
    cos = tl.cos(angle)[None, :, :]
    sin = tl.sin(angle)[None, :, :]
    if BACKWARD:
        sin = -sin

    q_groups = tl.cdiv(heads, HEADS)
    for group in range(tl.program_id(1), q_groups + tl.cdiv(kv_heads, HEADS), tl.num_programs(1)):
        next_x1, next_x2 = _load_group(q, k, group + tl.num_programs(1), at, HALF, HEADS)
        if group < q_groups:
            _store_rotated(x1, x2, q_out, group * HEADS, at, cos, sin, HALF, HEADS)
        else:
            _store_rotated(x1, x2, k_out, (group - q_groups) * HEADS, at, cos, sin, HALF, HEADS)
        x1, x2 = next_x1, next_x2


@lru_cache
def configure(
    rows: int, heads: int, kv_heads: int, head_dim: int, element_bytes: int, multiprocessors: int
) -> RopeConfig:
    """Threads load 16 bytes of each half of a head: eight warps two heads at a time, or four warps one head.

    Each program computes the angles of its rows, so one program takes all heads if there are two programs a
    multiprocessor. Chosen by a sweep on an H200 of a kernel that loaded no heads before the angles. With fewer rows,
    eight smaller programs a multiprocessor share the heads: 8192 rows of 16 heads of 64 elements take 15.9 us with 1024
    programs of four warps, 16.7 with 512 of eight (do_bench).
    """
    tile = max(1, 128 * 16 // element_bytes // next_power_of_2(head_dim // 2))
    tiles = cdiv(rows, tile)
    if tiles >= 2 * multiprocessors:
        return RopeConfig(rows=tile, heads=2, splits=1, num_warps=8)
    splits = min(heads + kv_heads, 8 * multiprocessors // tiles)
    return RopeConfig(rows=tile, heads=1, splits=splits, num_warps=4)


def launch_rope(
    q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, theta: float, *, backward: bool = False,
    out: tuple[torch.Tensor, torch.Tensor] | None = None, config: RopeConfig | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return q and k rotated by the angles of their positions, or with `backward` by the negative angles.

    The results are contiguous, or written to `out`, whose last strides are 1 and which may be q and k themselves.
    """
    batch, heads, sequence, head_dim = q.shape
    kv_heads = k.shape[1]
    q_out, k_out = out or (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k))
    if q.numel() + k.numel() == 0:
        return q_out, k_out
    q, k, positions = with_unit_column_stride(q), with_unit_column_stride(k), positions.contiguous()
    rows, half = batch * sequence, head_dim // 2
    config = config or configure(rows, heads, kv_heads, head_dim, q.element_size(), multiprocessors(q.device))
    with device_of(q):
        rope_kernel[(cdiv(rows, config.rows), config.splits)](
            q, k, positions, q_out, k_out, *q.stride()[:3], *k.stride()[:3], *q_out.stride()[:3], *k_out.stride()[:3],
            heads, kv_heads, rows, sequence,
            HALF=half, EXPONENT=-math.log2(theta) / half, BACKWARD=backward,
            ROWS=config.rows, HEADS=config.heads, PAIRS=next_power_of_2(half), num_warps=config.num_warps,
        )
    return q_out, k_out


class RopeFunction(torch.autograd.Function):
    """Save positions. The backward pass reads the gradients of both outputs once and writes those of q and k."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, theta: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(positions)
        ctx.theta = theta
        with declare.computing(*FORWARD):
            return launch_rope(q, k, positions, theta)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, dq_out: torch.Tensor, dk_out: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        (positions,) = ctx.saved_tensors
        names = {"q_ptr": "dq_out", "k_ptr": "dk_out", "q_out_ptr": "dq", "k_out_ptr": "dk"}
        with declare.computing(*BACKWARD, **names):
            dq, dk = launch_rope(dq_out, dk_out, positions, ctx.theta, backward=True)
        return dq, dk, None, None


def rope(
    q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, theta: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return q and k with pair (i, i + head_dim/2) of each head rotated by positions * theta^(-2i/head_dim).

    Differentiable once in q and k.

    Args:
        q: [batch, heads, sequence, head_dim], bfloat16, float16 or float32, on a GPU, head_dim even. Copied
            unless its last stride is 1.
        k: [batch, kv_heads, sequence, head_dim], likewise, of q's dtype and device; kv_heads may be any number.
        positions: [batch, sequence], int32 or int64, on q's device. Angles are float32 products. Their error grows
            with the position (1e-3 radians at 10000), and float32 rounds positions from 2^24 on.
        theta: the base of the frequencies, above 0.

    Returns:
        q_out, k_out: new contiguous tensors of the shapes and dtype of q and k.

    Raises:
        ValueError: shapes or devices do not fit, head_dim is odd, theta is not positive, or the tensors are not on a
            GPU (outside the interpreter).
        TypeError: q and k differ in dtype, or a dtype is not supported.
    """
    check_tensors(q=q, k=k)
    if q.ndim != 4 or k.ndim != 4 or (q.shape[0], *q.shape[2:]) != (k.shape[0], *k.shape[2:]):
        raise ValueError(
            "q and k must be [batch, heads, sequence, head_dim] and differ in heads alone, got "
            f"{tuple(q.shape)} and {tuple(k.shape)}; add missing axes"
        )
    if q.shape[-1] % 2 or q.shape[-1] == 0:
        raise ValueError(f"head_dim must be even, as halves are paired, got {q.shape[-1]}; pass the rotated part")
    if positions.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"positions must be int32 or int64, got {positions.dtype}; cast them with .to(torch.int32)")
    if positions.shape != (q.shape[0], q.shape[2]) or positions.device != q.device:
        raise ValueError(
            f"positions must be [batch, sequence] = {[q.shape[0], q.shape[2]]} on {q.device}, got "
            f"{list(positions.shape)} on {positions.device}; expand and move them"
        )
    if theta <= 0:
        raise ValueError(f"theta must be positive, got {theta}; 10000 and 500000 are common")
    rotated: tuple[torch.Tensor, torch.Tensor] = RopeFunction.apply(q, k, positions, theta)
    return rotated


def apply(inputs: dict[str, torch.Tensor], **attributes: Any) -> dict[str, torch.Tensor]:
    """Run the block `rope`: q, k, positions, theta -> q_out, k_out."""
    q_out, k_out = rope(inputs["q"], inputs["k"], inputs["positions"], **attributes)
    return {"q_out": q_out, "k_out": k_out}
