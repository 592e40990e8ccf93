"""Rotary position embedding of queries and keys in one launch, forward and backward.

    out = [x1 cos - x2 sin, x2 cos + x1 sin]      x1, x2: the halves of a head
    angle of pair i = position * theta^(-2i/head_dim)

Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", arXiv:2104.09864; halves as Llama pairs
them. Shapes: q, q_out [batch, heads, sequence, head_dim], k, k_out [batch, kv_heads, sequence, head_dim], positions
[batch, sequence]. bfloat16, float16 or float32 in and out; fp32 inside. Angles are integers in units of 2^-64 turns.
Whole turns overflow, so no sine takes a large number. The backward pass is the same kernel with the angle negated. It
reads positions and the gradients; only positions are saved.

The launcher can also rotate in place, or into views of a larger tensor, because a pair is read before it is written.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from xlafuse.triton_side.calls import declare
from xlafuse.triton_side.configs.tuned import tuned
from xlafuse.triton_side.kernels.shared.launch import (
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

TURNS = tl.constexpr(0.5 / math.pi)  # of a radian
RADIANS = tl.constexpr(math.pi * 2.0**-31)  # of 2^-32 turns


@dataclass(frozen=True)
class RopeConfig:
    """Launch configuration: a program rotates `vectors` vectors of `heads` heads at a time, queries' heads first.

    A vector is up to 16 bytes of the first half of a head at one position, and as many of the second half. Both numbers
    are powers of two. `splits` programs share the heads of the same vectors.
    """

    vectors: int
    heads: int
    splits: int
    num_warps: int


def rope_flops(shapes: declare.Shapes) -> float:
    """Return two products and a sum an element, and angle, cosine and sine for each pair and position."""
    rotated = math.prod(shapes["q_ptr"]) + math.prod(shapes["k_ptr"])
    return 3 * rotated + 3 * math.prod(shapes["positions_ptr"]) * shapes["q_ptr"][-1] / 2


@triton.jit
def _turns(pair_of_vector, WIDTH: tl.constexpr, EXPONENT: tl.constexpr):
    """Return the turns that a position adds to the angles of WIDTH pairs from each `pair_of_vector` on, int64.

    The unit is 2^-64 turns. Only a vector's first frequency takes an exp2; the others are its products with constants.
    The position multiplies a frequency's error, so they are float64.
    """
    lane = tl.arange(0, WIDTH)
    within_vector = tl.full([WIDTH], TURNS, tl.float64)
    for i in tl.static_range(1, WIDTH):
        within_vector = tl.where(lane == i, TURNS * 2.0 ** (EXPONENT * i), within_vector)
    turns = tl.exp2(pair_of_vector.to(tl.float64) * EXPONENT)[:, None] * within_vector[None, :]
    if EXPONENT > 0:  # theta < 1: frequencies above 1 may be whole turns and more
        turns -= tl.floor(turns + 0.5)
    return (turns * 2.0**64).to(tl.int64)


@triton.jit
def _cos_sin(turn):
    """Return cosine and sine of turn * 2^-32 turns, int32, right to about two units in the last place.

    An eighth of a turn and less needs few terms; the coefficients are those of the Cephes library's sinf and cosf.
    """
    quarter = (turn + 2**29) >> 30
    x = (turn - (quarter << 30)).to(tl.float32) * RADIANS
    xx = x * x
    s = ((-1.9515295891e-4 * xx + 8.3321608736e-3) * xx - 1.6666654611e-1) * (xx * x) + x
    c = ((2.443315711809948e-5 * xx - 1.388731625493765e-3) * xx + 4.166664568298827e-2) * (xx * xx) - 0.5 * xx + 1.0
    odd = (quarter & 1) != 0
    sin = tl.where(odd, c, s)
    cos = tl.where(odd, s, c)
    return tl.where(((quarter + 1) & 2) != 0, -cos, cos), tl.where((quarter & 2) != 0, -sin, sin)


@triton.jit
def _first_head(q, k, group, at, HEADS: tl.constexpr):
    """Return (pointers to the first half of a group's first head, stride of heads, number of heads from there on).

    q, k: (pointer, strides of batch, head and position, number of heads). at: (batch, position, pair, mask).
    """
    batch, position, pair, _ = at
    q_groups = tl.cdiv(q[4], HEADS)
    of_q = group < q_groups
    first = tl.where(of_q, group, group - q_groups) * HEADS
    head_stride = tl.where(of_q, q[2], k[2]).to(tl.int64)
    offset = batch * tl.where(of_q, q[1], k[1]) + position * tl.where(of_q, q[3], k[3]) + pair
    pointers = tl.where(of_q, q[0], k[0]) + first * head_stride + offset
    return pointers, head_stride, tl.where(of_q, q[4], k[4]) - first


@triton.jit
def _load(q, k, group, at, HALF: tl.constexpr, HEADS: tl.constexpr):
    """Return a tuple with both halves of a group's heads, one head after another.

    An axis of heads would not do: Triton 3.6 would compute the angles of each head again.
    """
    pointers, head_stride, heads = _first_head(q, k, group, at, HEADS)
    loaded = ()
    for i in tl.static_range(HEADS):
        mask = at[3] & (i < heads)
        loaded += (tl.load(pointers, mask=mask), tl.load(pointers + HALF, mask=mask))  # type: ignore[assignment]
        pointers += head_stride
    return loaded


@triton.jit
def _store_rotated(loaded, cos, sin, q_out, k_out, group, at, HALF: tl.constexpr, HEADS: tl.constexpr):
    """Rotate heads that `_load` returned by angles [vectors, pairs], and store them."""
    pointers, head_stride, heads = _first_head(q_out, k_out, group, at, HEADS)
    for i in tl.static_range(HEADS):
        mask = at[3] & (i < heads)
        x1, x2 = loaded[2 * i].to(tl.float32), loaded[2 * i + 1].to(tl.float32)
        tl.store(pointers, (x1 * cos - x2 * sin).to(q_out[0].dtype.element_ty), mask=mask)
        tl.store(pointers + HALF, (x2 * cos + x1 * sin).to(q_out[0].dtype.element_ty), mask=mask)
        pointers += head_stride


@declare.declare(flops=rope_flops)  # the caller declares the operations of either pass
@triton.jit
def rope_kernel(
    q_ptr, k_ptr, positions_ptr, q_out_ptr, k_out_ptr,
    q_stride_batch, q_stride_head, q_stride_position, k_stride_batch, k_stride_head, k_stride_position,
    q_out_stride_batch, q_out_stride_head, q_out_stride_position,
    k_out_stride_batch, k_out_stride_head, k_out_stride_position, heads, kv_heads, rows, sequence,
    HALF: tl.constexpr, EXPONENT: tl.constexpr, BACKWARD: tl.constexpr,
    VECTORS: tl.constexpr, WIDTH: tl.constexpr, HEADS: tl.constexpr,
):
    """Rotate the heads at VECTORS vectors: those of all positions of all sequences, one position after another."""
    q = (q_ptr, q_stride_batch, q_stride_head, q_stride_position, heads)
    k = (k_ptr, k_stride_batch, k_stride_head, k_stride_position, kv_heads)
    q_out = (q_out_ptr, q_out_stride_batch, q_out_stride_head, q_out_stride_position, heads)
    k_out = (k_out_ptr, k_out_stride_batch, k_out_stride_head, k_out_stride_position, kv_heads)
    # Vectors, not rows of a power of two, are numbered, so no thread lacks a pair where a half has 48.
    vector = tl.program_id(0) * VECTORS + tl.arange(0, VECTORS)
    row = vector // tl.cdiv(HALF, WIDTH)
    pair_of_vector = vector % tl.cdiv(HALF, WIDTH) * WIDTH
    pair = pair_of_vector[:, None] + tl.arange(0, WIDTH)[None, :]
    mask = (row < rows)[:, None]
    if HALF % WIDTH != 0:
        mask &= pair < HALF
    batch = (row // sequence).to(tl.int64)[:, None]
    position = (row % sequence).to(tl.int64)[:, None]
    at = (batch, position, pair, mask)
    # The first heads are on their way while the angles are computed.
    loaded = _load(q, k, tl.program_id(1), at, HALF, HEADS)

    given = tl.load(positions_ptr + row, mask=row < rows, other=0).to(tl.int64)
    turn = (given[:, None] * _turns(pair_of_vector, WIDTH, EXPONENT)) >> 32
    cos, sin = _cos_sin(turn.to(tl.int32))
    if BACKWARD:
        sin = -sin

    _store_rotated(loaded, cos, sin, q_out, k_out, tl.program_id(1), at, HALF, HEADS)
    groups = tl.cdiv(heads, HEADS) + tl.cdiv(kv_heads, HEADS)
    for group in range(tl.program_id(1) + tl.num_programs(1), groups, tl.num_programs(1)):
        loaded = _load(q, k, group, at, HALF, HEADS)
        _store_rotated(loaded, cos, sin, q_out, k_out, group, at, HALF, HEADS)


@tuned
def configure(
    rows: int, heads: int, kv_heads: int, head_dim: int, element_bytes: int, multiprocessors: int
) -> RopeConfig:
    """A thread computes the angles of one vector, and loads it of up to four heads at once.

    One program takes all heads of its vectors if there are two programs a multiprocessor. With fewer vectors, up to
    four programs a multiprocessor share the heads.
    """
    vectors = rows * cdiv(head_dim // 2, width_of_vectors(head_dim, element_bytes))
    programs = cdiv(vectors, 128)
    if programs >= 2 * multiprocessors:
        return RopeConfig(vectors=128, heads=4, splits=1, num_warps=4)
    groups = cdiv(heads, 2) + cdiv(kv_heads, 2)
    splits = min(groups, max(1, 4 * multiprocessors // programs))
    return RopeConfig(vectors=128, heads=2, splits=splits, num_warps=4)


def width_of_vectors(head_dim: int, element_bytes: int) -> int:
    """Return the elements of a vector."""
    return min(16 // element_bytes, next_power_of_2(head_dim // 2))


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
    rows, half, width = batch * sequence, head_dim // 2, width_of_vectors(head_dim, q.element_size())
    config = config or configure(rows, heads, kv_heads, head_dim, q.element_size(), multiprocessors(q.device))
    with device_of(q):
        rope_kernel[(cdiv(rows * cdiv(half, width), config.vectors), config.splits)](
            q, k, positions, q_out, k_out, *q.stride()[:3], *k.stride()[:3], *q_out.stride()[:3], *k_out.stride()[:3],
            heads, kv_heads, rows, sequence,
            HALF=half, EXPONENT=-math.log2(theta) / half, BACKWARD=backward,
            VECTORS=config.vectors, WIDTH=width, HEADS=config.heads, num_warps=config.num_warps,
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
        positions: [batch, sequence], int32 or int64, on q's device. Angles are right to 1e-8 radians for positions
            up to 2^24.
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
