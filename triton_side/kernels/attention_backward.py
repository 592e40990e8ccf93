"""Gradient of causal attention as Triton kernels (Dao et al., "FlashAttention-2", arXiv:2307.08691).

With p = softmax(causal(scale * q k^T)), dout the gradient of out = p v, and delta[row] = sum(dout * out over head_dim):

    dv = p^T dout        ds = p * (dout v^T - delta)        dq = scale * ds k        dk = scale * ds^T q

p is recomputed from q, k and the forward's logsumexp2. One kernel walks the queries below a tile of keys for dk and dv,
another the keys before a tile of queries for dq. That takes seven products where a single kernel takes five, but it
needs no atomics: results are the same in every run.

Shapes and dtypes as in `attention.py`; delta [batch, heads, sequence], float32.
"""

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from triton_side.declare import Shapes, again, declare, gradient
from triton_side.kernels._launch import device_of
from triton_side.kernels._tiles import add_product, load_rows, product, product_precision, provide_descriptor_memory

LOG2_E = 1.4426950408889634

DELTA = (gradient("mul", "softmax/divide", "delta"), gradient("reduce_sum", "softmax/sum", "delta"))
# Both large kernels rebuild the weights from q, k and the logarithms of their sums, and take both from there to ds.
SHARED = (
    again("dot", "scores"), again("div", "scores"), again("select", "mask"), again("sub", "softmax/exp"),
    again("exp", "softmax/exp"), again("div", "softmax/divide"),
    gradient("dot", "values", "dweights"), gradient("mul", "softmax/exp", "dscores"),
)  # fmt: skip
DK_DV = (*SHARED, gradient("dot", "values", "dv"), gradient("dot", "scores", "dk"))
DQ = (*SHARED, gradient("dot", "scores", "dq"))


def product_flops(shapes: Shapes) -> float:
    """One product of sequence x sequence x head_dim for every head, below the diagonal."""
    batch, heads, sequence, head_dim = shapes["q_ptr"]
    return batch * heads * sequence * sequence * head_dim


@dataclass(frozen=True)
class BackwardConfig:
    """How one of the two large backward kernels is tiled: `block_q` rows of queries by `block_kv` of keys and values.

    The dk, dv kernel keeps the keys and walks the queries, the dq kernel the other way round. `descriptors`: the walked
    tiles come through TMA tensor descriptors.
    """

    block_q: int
    block_kv: int
    num_warps: int
    num_stages: int
    descriptors: bool


@declare(*DELTA, flops=lambda shapes: 2 * math.prod(shapes["out_ptr"]))
@triton.jit
def attention_delta_kernel(
    out_ptr, dout_ptr, delta_ptr, stride_ob, stride_oh, stride_os, stride_od, stride_gb, stride_gh, stride_gs,
    stride_gd, heads, sequence, HEAD_DIM: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """delta[row] = sum(dout * out), ROWS rows of one head."""
    tiles = tl.cdiv(sequence, ROWS)
    head_index = (tl.program_id(0) // tiles).to(tl.int64)
    batch = head_index // heads
    head = head_index % heads
    start = tl.program_id(0) % tiles * ROWS
    out_ptr += batch * stride_ob + head * stride_oh
    dout_ptr += batch * stride_gb + head * stride_gh
    out = load_rows(out_ptr, stride_os, stride_od, start, sequence, ROWS, HEAD_DIM, False, True)
    dout = load_rows(dout_ptr, stride_gs, stride_gd, start, sequence, ROWS, HEAD_DIM, False, True)
    row = start + tl.arange(0, ROWS)
    delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), axis=1)
    tl.store(delta_ptr + head_index * sequence + row, delta, mask=row < sequence)


@triton.jit
def _add_queries(
    dk, dv, k, v, q_source, dout_source, logsumexp2_ptr, delta_ptr, stride_qs, stride_qd, stride_gs, stride_gd,
    kv_start, q_begin, q_end, sequence, scale_log2e,
    HEAD_DIM: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, DIAGONAL: tl.constexpr,
    CHECK: tl.constexpr, DESCRIPTORS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add what queries q_begin .. q_end contribute to dk (not yet scaled) and dv. Tiles are [keys, queries]."""
    for q_start in tl.range(q_begin, q_end, BLOCK_Q):
        row = q_start + tl.arange(0, BLOCK_Q)
        q = load_rows(q_source, stride_qs, stride_qd, q_start, sequence, BLOCK_Q, HEAD_DIM, DESCRIPTORS, CHECK)
        # Past the end q and dout are zero, so that any finite logsumexp and delta give zero contributions.
        if CHECK:
            logsumexp2 = tl.load(logsumexp2_ptr + row, mask=row < sequence, other=0.0)
            delta = tl.load(delta_ptr + row, mask=row < sequence, other=0.0)
        else:
            logsumexp2 = tl.load(logsumexp2_ptr + row)
            delta = tl.load(delta_ptr + row)
        dout = load_rows(dout_source, stride_gs, stride_gd, q_start, sequence, BLOCK_Q, HEAD_DIM, DESCRIPTORS, CHECK)
        scores = product(k, q.T, PRECISION)
        p = tl.exp2(scores * scale_log2e - logsumexp2[None, :])
        if DIAGONAL:
            column = kv_start + tl.arange(0, BLOCK_KV)
            p = tl.where(row[None, :] >= column[:, None], p, 0.0)
        dv = add_product(dv, p.to(dout.dtype), dout, PRECISION)
        dp = product(v, dout.T, PRECISION)
        ds = p * (dp - delta[None, :])
        dk = add_product(dk, ds.to(q.dtype), q, PRECISION)
    return dk, dv


@declare(*DK_DV, flops=lambda shapes: 4 * product_flops(shapes))
@triton.jit
def attention_dk_dv_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, logsumexp2_ptr, delta_ptr, dk_ptr, dv_ptr,
    stride_qb, stride_qh, stride_qs, stride_qd, stride_kb, stride_kh, stride_ks, stride_kd,
    stride_vb, stride_vh, stride_vs, stride_vd, stride_gb, stride_gh, stride_gs, stride_gd,
    heads, sequence, scale, scale_log2e,
    HEAD_DIM: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, EVEN: tl.constexpr,
    DESCRIPTORS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk and dv (contiguous) of BLOCK_KV rows of one head; EVEN: BLOCK_Q divides the sequence."""
    # In order of start: one head's tiles together, the first keys, which the most queries see, first.
    kv_tiles = tl.cdiv(sequence, BLOCK_KV)
    head_index = (tl.program_id(0) // kv_tiles).to(tl.int64)
    batch = head_index // heads
    head = head_index % heads
    kv_start = tl.program_id(0) % kv_tiles * BLOCK_KV
    q_ptr += batch * stride_qb + head * stride_qh
    k_ptr += batch * stride_kb + head * stride_kh
    v_ptr += batch * stride_vb + head * stride_vh
    dout_ptr += batch * stride_gb + head * stride_gh
    logsumexp2_ptr += head_index * sequence
    delta_ptr += head_index * sequence
    dk_ptr += head_index * sequence * HEAD_DIM
    dv_ptr += head_index * sequence * HEAD_DIM
    if DESCRIPTORS:
        q_source = tl.make_tensor_descriptor(q_ptr, [sequence, HEAD_DIM], [stride_qs, 1], [BLOCK_Q, HEAD_DIM])
        dout_source = tl.make_tensor_descriptor(dout_ptr, [sequence, HEAD_DIM], [stride_gs, 1], [BLOCK_Q, HEAD_DIM])
    else:
        q_source = q_ptr
        dout_source = dout_ptr

    k = load_rows(k_ptr, stride_ks, stride_kd, kv_start, sequence, BLOCK_KV, HEAD_DIM, False, True)
    v = load_rows(v_ptr, stride_vs, stride_vd, kv_start, sequence, BLOCK_KV, HEAD_DIM, False, True)
    dk = tl.zeros([BLOCK_KV, HEAD_DIM], tl.float32)
    dv = tl.zeros([BLOCK_KV, HEAD_DIM], tl.float32)

    # Tiles of queries stay multiples of BLOCK_Q from the start of the sequence, so that EVEN holds for all of them.
    diagonal_begin = kv_start // BLOCK_Q * BLOCK_Q
    diagonal_end = tl.minimum(tl.cdiv(kv_start + BLOCK_KV, BLOCK_Q) * BLOCK_Q, sequence)
    dk, dv = _add_queries(
        dk, dv, k, v, q_source, dout_source, logsumexp2_ptr, delta_ptr, stride_qs, stride_qd, stride_gs, stride_gd,
        kv_start, diagonal_begin, diagonal_end, sequence, scale_log2e,
        HEAD_DIM, BLOCK_Q, BLOCK_KV, True, not EVEN, DESCRIPTORS, PRECISION,
    )  # fmt: skip
    dk, dv = _add_queries(
        dk, dv, k, v, q_source, dout_source, logsumexp2_ptr, delta_ptr, stride_qs, stride_qd, stride_gs, stride_gd,
        kv_start, diagonal_end, sequence, sequence, scale_log2e,
        HEAD_DIM, BLOCK_Q, BLOCK_KV, False, not EVEN, DESCRIPTORS, PRECISION,
    )  # fmt: skip

    row = kv_start + tl.arange(0, BLOCK_KV)
    at = row[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
    tl.store(dk_ptr + at, (dk * scale).to(dk_ptr.dtype.element_ty), mask=row[:, None] < sequence)
    tl.store(dv_ptr + at, dv.to(dv_ptr.dtype.element_ty), mask=row[:, None] < sequence)


@triton.jit
def _add_keys(
    dq, q, dout, logsumexp2, delta, k_source, v_source, stride_ks, stride_kd, stride_vs, stride_vd,
    q_start, kv_begin, kv_end, sequence, scale_log2e,
    HEAD_DIM: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, DIAGONAL: tl.constexpr,
    DESCRIPTORS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add what keys kv_begin .. kv_end contribute to dq (not yet scaled). Only diagonal tiles may pass the end."""
    for kv_start in tl.range(kv_begin, kv_end, BLOCK_KV):
        k = load_rows(k_source, stride_ks, stride_kd, kv_start, sequence, BLOCK_KV, HEAD_DIM, DESCRIPTORS, DIAGONAL)
        scores = product(q, k.T, PRECISION)
        p = tl.exp2(scores * scale_log2e - logsumexp2[:, None])
        if DIAGONAL:
            row = q_start + tl.arange(0, BLOCK_Q)
            column = kv_start + tl.arange(0, BLOCK_KV)
            p = tl.where(row[:, None] >= column[None, :], p, 0.0)
        v = load_rows(v_source, stride_vs, stride_vd, kv_start, sequence, BLOCK_KV, HEAD_DIM, DESCRIPTORS, DIAGONAL)
        dp = product(dout, v.T, PRECISION)
        ds = p * (dp - delta[:, None])
        dq = add_product(dq, ds.to(k.dtype), k, PRECISION)
    return dq


@declare(*DQ, flops=lambda shapes: 3 * product_flops(shapes))
@triton.jit
def attention_dq_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, logsumexp2_ptr, delta_ptr, dq_ptr,
    stride_qb, stride_qh, stride_qs, stride_qd, stride_kb, stride_kh, stride_ks, stride_kd,
    stride_vb, stride_vh, stride_vs, stride_vd, stride_gb, stride_gh, stride_gs, stride_gd,
    heads, sequence, scale, scale_log2e,
    HEAD_DIM: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, DESCRIPTORS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """dq (contiguous) of BLOCK_Q rows of one head."""
    q_tiles = tl.cdiv(sequence, BLOCK_Q)
    head_index = (tl.program_id(0) // q_tiles).to(tl.int64)
    batch = head_index // heads
    head = head_index % heads
    q_start = (q_tiles - 1 - tl.program_id(0) % q_tiles) * BLOCK_Q  # the rows that see the most keys start first
    q_ptr += batch * stride_qb + head * stride_qh
    k_ptr += batch * stride_kb + head * stride_kh
    v_ptr += batch * stride_vb + head * stride_vh
    dout_ptr += batch * stride_gb + head * stride_gh
    logsumexp2_ptr += head_index * sequence
    delta_ptr += head_index * sequence
    dq_ptr += head_index * sequence * HEAD_DIM
    if DESCRIPTORS:
        k_source = tl.make_tensor_descriptor(k_ptr, [sequence, HEAD_DIM], [stride_ks, 1], [BLOCK_KV, HEAD_DIM])
        v_source = tl.make_tensor_descriptor(v_ptr, [sequence, HEAD_DIM], [stride_vs, 1], [BLOCK_KV, HEAD_DIM])
    else:
        k_source = k_ptr
        v_source = v_ptr

    q = load_rows(q_ptr, stride_qs, stride_qd, q_start, sequence, BLOCK_Q, HEAD_DIM, False, True)
    dout = load_rows(dout_ptr, stride_gs, stride_gd, q_start, sequence, BLOCK_Q, HEAD_DIM, False, True)
    row = q_start + tl.arange(0, BLOCK_Q)
    logsumexp2 = tl.load(logsumexp2_ptr + row, mask=row < sequence, other=0.0)
    delta = tl.load(delta_ptr + row, mask=row < sequence, other=0.0)
    dq = tl.zeros([BLOCK_Q, HEAD_DIM], tl.float32)
    masked_from = q_start // BLOCK_KV * BLOCK_KV
    dq = _add_keys(
        dq, q, dout, logsumexp2, delta, k_source, v_source, stride_ks, stride_kd, stride_vs, stride_vd,
        q_start, 0, masked_from, sequence, scale_log2e, HEAD_DIM, BLOCK_Q, BLOCK_KV, False, DESCRIPTORS, PRECISION,
    )  # fmt: skip
    dq = _add_keys(
        dq, q, dout, logsumexp2, delta, k_source, v_source, stride_ks, stride_kd, stride_vs, stride_vd,
        q_start, masked_from, tl.minimum(q_start + BLOCK_Q, sequence), sequence, scale_log2e,
        HEAD_DIM, BLOCK_Q, BLOCK_KV, True, DESCRIPTORS, PRECISION,
    )  # fmt: skip
    at = row[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
    tl.store(dq_ptr + at, (dq * scale).to(dq_ptr.dtype.element_ty), mask=row[:, None] < sequence)


def launch_delta(out: torch.Tensor, dout: torch.Tensor) -> torch.Tensor:
    """delta [batch, heads, sequence] in float32: sum(dout * out) over head_dim."""
    batch, heads, sequence, head_dim = out.shape
    delta = torch.empty((batch, heads, sequence), dtype=torch.float32, device=out.device)
    rows = 64
    with device_of(out):
        attention_delta_kernel[(batch * heads * triton.cdiv(sequence, rows),)](
            out, dout, delta, *out.stride(), *dout.stride(), heads, sequence, HEAD_DIM=head_dim, ROWS=rows, num_warps=4
        )
    return delta


def launch_dk_dv(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor, logsumexp2: torch.Tensor,
    delta: torch.Tensor, config: BackwardConfig,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """dk, dv, contiguous, in the inputs' dtype."""
    dk = torch.empty(k.shape, dtype=k.dtype, device=k.device)
    dv = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    even = q.shape[2] % config.block_q == 0
    _launch(attention_dk_dv_kernel, config.block_kv, (q, k, v, dout), (logsumexp2, delta, dk, dv), config, EVEN=even)
    return dk, dv


def launch_dq(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor, logsumexp2: torch.Tensor,
    delta: torch.Tensor, config: BackwardConfig,
) -> torch.Tensor:  # fmt: skip
    """dq, contiguous, in the inputs' dtype."""
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    _launch(attention_dq_kernel, config.block_q, (q, k, v, dout), (logsumexp2, delta, dq), config)
    return dq


def _launch(
    kernel: triton.JITFunction, rows: int, strided: tuple[torch.Tensor, ...], contiguous: tuple[torch.Tensor, ...],
    config: BackwardConfig, **constants: bool,
) -> None:  # fmt: skip
    """Run one of the two kernels: a program for every `rows` rows of every head."""
    batch, heads, sequence, head_dim = strided[0].shape
    scale = head_dim**-0.5
    with device_of(strided[0]):
        if config.descriptors:
            provide_descriptor_memory(strided[0].device)
        kernel[(batch * heads * triton.cdiv(sequence, rows),)](
            *strided, *contiguous, *(stride for tensor in strided for stride in tensor.stride()), heads, sequence,
            scale, scale * LOG2_E, HEAD_DIM=head_dim, BLOCK_Q=config.block_q, BLOCK_KV=config.block_kv,
            DESCRIPTORS=config.descriptors, PRECISION=product_precision(strided[0].dtype), **constants,
            num_warps=config.num_warps, num_stages=config.num_stages,
        )  # fmt: skip
