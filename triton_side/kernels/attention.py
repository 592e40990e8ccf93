"""Causal attention as Triton kernels: out = softmax(causal(q k^T / sqrt(head_dim))) v.

Tiled with an online softmax (Dao et al., "FlashAttention-2", arXiv 2307.08691): one program owns BLOCK_Q query
rows, walks the keys up to its diagonal and keeps the running maximum, the running sum and the unnormalised output,
so that no sequence x sequence matrix exists anywhere. Exponentials are base 2 with log2(e) folded into the scale.
The gradient is in `attention_backward.py`; from the forward it needs only `out` and one number a row,
logsumexp2[row] = log2(sum_j exp(score[row, j])).

Shapes: q, k, v, out [batch, heads, sequence, head_dim]; logsumexp2 [batch, heads, sequence], float32.
dtypes: bfloat16, float16, float32. Scores, softmax and accumulators are float32; the probabilities are cast to v's
dtype for the second product. float32 products follow `torch.get_float32_matmul_precision()`.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from triton_side.declare import Shapes, declare, forward
from triton_side.kernels._launch import check_tensors, device_of
from triton_side.kernels._tiles import (
    add_product,
    fits_descriptor,
    load_rows,
    product,
    product_precision,
    provide_descriptor_memory,
)
from triton_side.kernels.attention_backward import (
    LOG2_E,
    BackwardConfig,
    launch_delta,
    launch_dk_dv,
    launch_dq,
    product_flops,
)

HEAD_DIMS = (16, 32, 64, 128)

FORWARD = (
    forward("dot", "scores"), forward("div", "scores"), forward("select", "mask"),
    forward("reduce_max", "softmax/max"), forward("sub", "softmax/exp"), forward("exp", "softmax/exp"),
    forward("reduce_sum", "softmax/sum"), forward("div", "softmax/divide"), forward("dot", "values"),
)  # fmt: skip


def forward_flops(shapes: Shapes) -> float:
    """Of the two products, below the diagonal."""
    return 2 * product_flops(shapes)


@dataclass(frozen=True)
class ForwardConfig:
    """How the forward kernel is tiled and compiled.

    block_q, block_kv: rows of q, and of k and v, in a tile.
    descriptors: q, k and v come through TMA tensor descriptors instead of per-element pointers.
    """

    block_q: int
    block_kv: int
    num_warps: int
    num_stages: int
    descriptors: bool


@triton.jit
def _attend(
    accumulator, row_sum, row_max, q, k_source, v_source, stride_ks, stride_kd, stride_vs, stride_vd,
    q_start, kv_begin, kv_end, sequence, scale_log2e,
    HEAD_DIM: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, DIAGONAL: tl.constexpr,
    DESCRIPTORS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Fold keys kv_begin .. kv_end into the running softmax; DIAGONAL tiles are masked and may pass the end."""
    for kv_start in tl.range(kv_begin, kv_end, BLOCK_KV):
        k = load_rows(k_source, stride_ks, stride_kd, kv_start, sequence, BLOCK_KV, HEAD_DIM, DESCRIPTORS, DIAGONAL)
        scores = product(q, k.T, PRECISION)
        if DIAGONAL:
            row = q_start + tl.arange(0, BLOCK_Q)
            column = kv_start + tl.arange(0, BLOCK_KV)
            scores = tl.where(row[:, None] >= column[None, :], scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1) * scale_log2e)
        p = tl.exp2(scores * scale_log2e - new_max[:, None])
        correction = tl.exp2(row_max - new_max)
        row_sum = row_sum * correction + tl.sum(p, 1)
        accumulator = accumulator * correction[:, None]
        v = load_rows(v_source, stride_vs, stride_vd, kv_start, sequence, BLOCK_KV, HEAD_DIM, DESCRIPTORS, DIAGONAL)
        accumulator = add_product(accumulator, p.to(v.dtype), v, PRECISION)
        row_max = new_max
    return accumulator, row_sum, row_max


@declare(*FORWARD, flops=forward_flops)
@triton.jit
def attention_forward_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, logsumexp2_ptr,
    stride_qb, stride_qh, stride_qs, stride_qd, stride_kb, stride_kh, stride_ks, stride_kd,
    stride_vb, stride_vh, stride_vs, stride_vd, heads, sequence, scale_log2e,
    HEAD_DIM: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, DESCRIPTORS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """out (contiguous) of BLOCK_Q rows of one head."""
    # In order of start: one head's tiles together, so that its keys and values stay in L2, and the rows that see the
    # most keys first.
    q_tiles = tl.cdiv(sequence, BLOCK_Q)
    head_index = (tl.program_id(0) // q_tiles).to(tl.int64)
    batch = head_index // heads
    head = head_index % heads
    q_start = (q_tiles - 1 - tl.program_id(0) % q_tiles) * BLOCK_Q
    q_ptr += batch * stride_qb + head * stride_qh
    k_ptr += batch * stride_kb + head * stride_kh
    v_ptr += batch * stride_vb + head * stride_vh
    out_ptr += head_index * sequence * HEAD_DIM
    if DESCRIPTORS:
        q_source = tl.make_tensor_descriptor(q_ptr, [sequence, HEAD_DIM], [stride_qs, 1], [BLOCK_Q, HEAD_DIM])
        k_source = tl.make_tensor_descriptor(k_ptr, [sequence, HEAD_DIM], [stride_ks, 1], [BLOCK_KV, HEAD_DIM])
        v_source = tl.make_tensor_descriptor(v_ptr, [sequence, HEAD_DIM], [stride_vs, 1], [BLOCK_KV, HEAD_DIM])
    else:
        q_source = q_ptr
        k_source = k_ptr
        v_source = v_ptr

    q = load_rows(q_source, stride_qs, stride_qd, q_start, sequence, BLOCK_Q, HEAD_DIM, DESCRIPTORS, True)
    # float32's lowest number, not -inf: of a first tile of scores of -inf, the maximum must not be -inf, or what is
    # taken from it is NaN.
    row_max = tl.full([BLOCK_Q], -3.4028234663852886e38, tl.float32)
    row_sum = tl.zeros([BLOCK_Q], tl.float32)
    accumulator = tl.zeros([BLOCK_Q, HEAD_DIM], tl.float32)

    # Tiles that end by q_start are seen whole by every row here. In the others the causal mask also hides keys past
    # the end of the sequence from every row that is stored, so no other mask is needed.
    masked_from = q_start // BLOCK_KV * BLOCK_KV
    accumulator, row_sum, row_max = _attend(
        accumulator, row_sum, row_max, q, k_source, v_source, stride_ks, stride_kd, stride_vs, stride_vd,
        q_start, 0, masked_from, sequence, scale_log2e,
        HEAD_DIM, BLOCK_Q, BLOCK_KV, False, DESCRIPTORS, PRECISION,
    )  # fmt: skip
    accumulator, row_sum, row_max = _attend(
        accumulator, row_sum, row_max, q, k_source, v_source, stride_ks, stride_kd, stride_vs, stride_vd,
        q_start, masked_from, tl.minimum(q_start + BLOCK_Q, sequence), sequence, scale_log2e,
        HEAD_DIM, BLOCK_Q, BLOCK_KV, True, DESCRIPTORS, PRECISION,
    )  # fmt: skip

    row = q_start + tl.arange(0, BLOCK_Q)
    at = row[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
    out = accumulator / row_sum[:, None]
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=row[:, None] < sequence)
    if logsumexp2_ptr is not None:
        tl.store(logsumexp2_ptr + head_index * sequence + row, row_max + tl.log2(row_sum), mask=row < sequence)


def forward_config(dtype: torch.dtype, head_dim: int, precision: str, descriptors: bool) -> ForwardConfig:
    """Tiles of the forward kernel; `descriptors`: all of q, k, v can be read through one.

    float32 tiles are as large as registers allow without spills (cuobjdump, sm_90): IEEE products run on the ordinary
    cores and hold whole operand rows in registers. 16-bit tiles are the fastest of a sweep on an H200 (Triton 3.6,
    batch 4, 32 heads, sequence 4096): TFLOP/s 478 for head_dim 128 and 411 for 64, against 463 and 378 for each with
    the other's tiles. Warp specialisation gave 489 at best and NaN in other tilings, so it is not used.
    """
    if dtype == torch.float32 and precision == "ieee":
        block_q = 64 if head_dim <= 64 else 32
        return ForwardConfig(block_q, 32, num_warps=8, num_stages=1, descriptors=False)
    if dtype == torch.float32:
        return ForwardConfig(128, 32, num_warps=8, num_stages=2, descriptors=False)
    if head_dim <= 64:
        return ForwardConfig(128, 64, num_warps=8, num_stages=3, descriptors=False)
    return ForwardConfig(64, 64, num_warps=4, num_stages=3, descriptors=descriptors)


def dk_dv_config(dtype: torch.dtype, head_dim: int, precision: str, descriptors: bool) -> BackwardConfig:
    """Tiles of the kernel for dk and dv; `descriptors`: q and dout can be read through one.

    16-bit tiles are the fastest of the sweep of `forward_config`: TFLOP/s of the four products 527 for head_dim 128
    (483 with 128 rows of keys) and 440 for 64 (401 and 432 with 64 rows of queries; through pointers 474 once and 375
    later). For 128 they spill 24 bytes of registers; through pointers they would spill 160, so those keep 128 rows of
    keys and 8 warps.
    """
    if dtype == torch.float32 and precision == "ieee":
        block = 32 if head_dim <= 64 else 16
        return BackwardConfig(block, block, num_warps=8, num_stages=1, descriptors=False)
    if dtype == torch.float32:
        block_kv = 64 if head_dim <= 64 else 32
        return BackwardConfig(32, block_kv, num_warps=4, num_stages=1, descriptors=False)
    if head_dim <= 64:
        return BackwardConfig(32 if descriptors else 64, 64, num_warps=4, num_stages=3, descriptors=descriptors)
    if not descriptors:
        return BackwardConfig(64, 128, num_warps=8, num_stages=2, descriptors=False)
    return BackwardConfig(64, 64, num_warps=4, num_stages=2, descriptors=True)


def dq_config(dtype: torch.dtype, head_dim: int, precision: str, descriptors: bool) -> BackwardConfig:
    """Tiles of the kernel for dq; `descriptors`: k and v can be read through one.

    16-bit tiles are from the sweep of `forward_config`: TFLOP/s of the three products 555 for head_dim 128 (572 with
    128 x 32, 8 warps, 3 stages, which for 64 has 426) and 576 for 64 (564 through descriptors).
    """
    if dtype == torch.float32 and precision == "ieee":
        block = 32 if head_dim <= 64 else 16
        return BackwardConfig(block, block, num_warps=8, num_stages=1, descriptors=False)
    if dtype == torch.float32:
        return BackwardConfig(64, 32, num_warps=4, num_stages=1, descriptors=False)
    if head_dim <= 64:
        return BackwardConfig(64, 64, num_warps=4, num_stages=3, descriptors=False)
    return BackwardConfig(64, 64, num_warps=4, num_stages=2, descriptors=descriptors)


def launch_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, config: ForwardConfig, save_logsumexp: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """out (contiguous) and, where a backward pass will follow, logsumexp2."""
    batch, heads, sequence, head_dim = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    logsumexp2 = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device) if save_logsumexp else None
    if q.numel() == 0:
        return out, logsumexp2
    with device_of(q):
        if config.descriptors:
            provide_descriptor_memory(q.device)
        attention_forward_kernel[(batch * heads * triton.cdiv(sequence, config.block_q),)](
            q, k, v, out, logsumexp2, *q.stride(), *k.stride(), *v.stride(), heads, sequence,
            head_dim**-0.5 * LOG2_E, HEAD_DIM=head_dim, BLOCK_Q=config.block_q, BLOCK_KV=config.block_kv,
            DESCRIPTORS=config.descriptors, PRECISION=product_precision(q.dtype),
            num_warps=config.num_warps, num_stages=config.num_stages,
        )  # fmt: skip
    return out, logsumexp2


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out, logsumexp2 = launch_forward(q, k, v, _choose(forward_config, q, k, v), save_logsumexp=True)
        ctx.save_for_backward(q, k, v, out, logsumexp2)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q, k, v, out, logsumexp2 = ctx.saved_tensors
        if q.shape[2] == 1 or q.numel() == 0:
            # A lone key has weight 1 whatever q and k are: exact zeros, where dp - delta would leave rounding errors.
            return torch.zeros_like(q), torch.zeros_like(k), dout.clone()
        delta = launch_delta(out, dout)
        dk, dv = launch_dk_dv(q, k, v, dout, logsumexp2, delta, _choose(dk_dv_config, q, dout))
        dq = launch_dq(q, k, v, dout, logsumexp2, delta, _choose(dq_config, k, v))
        return dq, dk, dv


def _choose(choose: Any, *read_in_tiles: torch.Tensor) -> Any:
    first = read_in_tiles[0]
    descriptors = all(fits_descriptor(tensor) for tensor in read_in_tiles)
    return choose(first.dtype, first.shape[-1], product_precision(first.dtype), descriptors)


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """softmax(causal(q k^T / sqrt(head_dim))) v, differentiable once in q, k and v.

    A query sees the keys at its own position and before. Any strides are read in place.

    Args:
        q, k, v: [batch, heads, sequence, head_dim], of one shape and dtype (bfloat16, float16, float32).

    Returns:
        out [batch, heads, sequence, head_dim], contiguous, in the inputs' dtype.

    Raises:
        ValueError: the shapes differ, head_dim is not 16, 32, 64 or 128, a tensor is on another device or not on a
            GPU (outside the interpreter), or float32 products are set to "medium".
        TypeError: a dtype is not supported, or they differ.
    """
    check_tensors(q=q, k=k, v=v)
    if q.ndim != 4 or q.shape != k.shape or q.shape != v.shape:
        raise ValueError(
            "q, k and v must share one shape [batch, heads, sequence, head_dim], got "
            f"{tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}; repeat shared heads, add missing axes"
        )
    if q.shape[-1] not in HEAD_DIMS:
        raise ValueError(
            f"head_dim must be one of {HEAD_DIMS}, got {q.shape[-1]}; pad q, k and v with zeros to the next of them "
            "and scale q by sqrt(padded / head_dim)"
        )
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (q, k, v)):
        return _Attention.apply(q, k, v)
    out, _ = launch_forward(q, k, v, _choose(forward_config, q, k, v), save_logsumexp=False)
    return out


def apply(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The attention block: inputs q, k, v; output out."""
    return {"out": attention(inputs["q"], inputs["k"], inputs["v"])}
