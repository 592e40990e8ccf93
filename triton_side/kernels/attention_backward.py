"""Gradient of attention as Triton kernels (Dao et al., "FlashAttention-2", arXiv:2307.08691).

With p = softmax(masked(scale * q k^T + bias)), dout the gradient of out = p v, and delta[row] the sum of dout * out
over head_dim:

    dv = p^T dout        ds = p * (dout v^T - delta)        dq = scale * ds k        dk = scale * ds^T q

and dbias the sum of ds over the batch.

p is recomputed from q, k and the forward's logsumexp2. One kernel walks the queries that see a tile of keys, of all
heads that share it, for dk and dv, another the keys that a tile of queries sees for dq. That takes seven products where
a single kernel takes five, but it needs no atomics: results are the same in every run. For dbias a third kernel makes
ds once more, with two products: each program walks the batch for one tile of a head, so that bias and dbias move once
and no ds [batch, heads, sequence, sequence] is in memory. Of a batch of one dbias is ds, which the kernel for dq has.

Shapes and dtypes as in `attention.py`; delta [batch, heads, sequence], float32.
"""

import math
from collections.abc import Callable

import torch
import triton
import triton.language as tl

from triton_side.calls.declare import Computed, Shapes, again, computing, declare, gradient
from triton_side.kernels._attention_configs import TileConfig
from triton_side.kernels._attention_tiles import (
    bias_strides,
    bias_tile,
    empty_rows,
    keys_seen,
    packing,
    pairs_seen,
    place,
    place_number,
    programs_of,
    queries_seeing,
    rows_written,
    sees,
    store_pairs,
    written_strides,
)
from triton_side.kernels._constants import LOG2_E
from triton_side.kernels._launch import cdiv, device_of
from triton_side.kernels._tiles import add_product, load_rows, product, product_precision, provide_descriptor_memory

DELTA = (gradient("mul", "softmax/divide", "delta"), gradient("reduce_sum", "softmax/sum", "delta"))
# Both large kernels rebuild the weights from q, k and the logarithms of their sums, and take both from there to ds.
SHARED = (
    again("dot", "scores"), again("div", "scores"), again("add", "bias"), again("select", "mask"),
    again("sub", "softmax/exp"), again("exp", "softmax/exp"), again("div", "softmax/divide"),
    gradient("dot", "values", "dweights"), gradient("mul", "softmax/exp", "dscores"),
)
DK_DV = (*SHARED, gradient("dot", "values", "dv"), gradient("dot", "scores", "dk"))
DQ = (*SHARED, gradient("dot", "scores", "dq"))
BATCH_SUM = gradient("reduce_sum", "bias", "dbias")
DBIAS = (*SHARED, BATCH_SUM)


def by_case(*operations: Computed) -> dict[tuple[bool, bool], tuple[Computed, ...]]:
    """By (causal, biased) those of the block: where all is seen there is no mask, but that of a last tile."""

    def present(*absent: str) -> tuple[Computed, ...]:
        return tuple(operation for operation in operations if operation.stage not in absent)

    return {
        (True, True): present(), (True, False): present("bias"), (False, True): present("mask"),
        (False, False): present("mask", "bias"),
    }


DK_DV_BY_CASE, DQ_BY_CASE = by_case(*DK_DV), by_case(*DQ)
DQ_DBIAS_BY_CASE, DBIAS_BY_CASE = by_case(*DQ, BATCH_SUM), by_case(*DBIAS)


def products(count: int) -> Callable[[Shapes], float | None]:
    """FLOPs of products of sequence x sequence x head_dim for every head, over what is seen; None of packed sequences,
    whose lengths are data."""

    def flops(given: Shapes) -> float | None:
        batch, heads, sequence, head_dim = given["q_ptr"]
        pairs = pairs_seen(sequence, given["CAUSAL"], given["WINDOW"])
        return None if given["PACKED"] else count * 2 * batch * heads * pairs * head_dim

    return flops


@declare(*DELTA, flops=lambda shapes: 2 * math.prod(shapes["out_ptr"]))
@triton.jit
def attention_delta_kernel(
    out_ptr, dout_ptr, delta_ptr, stride_ob, stride_oh, stride_os, stride_od, stride_gb, stride_gh, stride_gs,
    stride_gd, heads, sequence, HEAD_DIM: tl.constexpr, ROWS: tl.constexpr,
):
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
    bias_ptr, bias_stride_q, bias_stride_k, kv_start, q_begin, q_end, sequence, scale_log2e,
    HEAD_DIM: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    MASKED: tl.constexpr, CHECK: tl.constexpr, DESCRIPTORS: tl.constexpr, PRECISION: tl.constexpr,
):
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
        if bias_ptr is not None:
            scores += bias_tile(
                bias_ptr, bias_stride_q, bias_stride_k, q_start, kv_start, sequence, HEAD_DIM, BLOCK_Q, BLOCK_KV
            ).T
        p = tl.exp2(scores * scale_log2e - logsumexp2[None, :])
        if MASKED:
            column = kv_start + tl.arange(0, BLOCK_KV)
            p = tl.where(sees(row[None, :], column[:, None], sequence, CAUSAL, WINDOW), p, 0.0)
        dv = add_product(dv, p.to(dout.dtype), dout, PRECISION)
        dp = product(v, dout.T, PRECISION)
        ds = p * (dp - delta[None, :])
        dk = add_product(dk, ds.to(q.dtype), q, PRECISION)
    return dk, dv


@declare(*DK_DV, flops=products(4))
@triton.jit
def attention_dk_dv_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, bias_ptr, logsumexp2_ptr, delta_ptr, dk_ptr, dv_ptr, offsets_ptr,
    stride_qb, stride_qh, stride_qs, stride_qd, stride_kb, stride_kh, stride_ks, stride_kd,
    stride_vb, stride_vh, stride_vs, stride_vd, stride_gb, stride_gh, stride_gs, stride_gd,
    stride_wb, stride_wh, ROW: tl.constexpr, bias_stride_h, bias_stride_q, bias_stride_k,
    heads, sequence, sequences, PACKED: tl.constexpr, scale, scale_log2e,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr, EVEN: tl.constexpr, DESCRIPTORS: tl.constexpr, PRECISION: tl.constexpr,
):
    """dk and dv (of the same strides, columns side by side) of BLOCK_KV rows of one head of k and v, which GROUP of the
    `heads` share; EVEN: BLOCK_Q divides the sequence."""
    # In order of start: one head's tiles together, the first keys, which the most queries see, first.
    kv_index, tile, kv_tiles, first, length = place(
        place_number(bias_ptr, sequence, heads, BLOCK_KV), sequence, offsets_ptr, sequences, BLOCK_KV, PACKED
    )
    if PACKED:
        if tile >= kv_tiles:
            return
    batch = kv_index // (heads // GROUP)
    kv_head = kv_index % (heads // GROUP)
    kv_start = tile * BLOCK_KV
    q_ptr += batch * stride_qb + kv_head * GROUP * stride_qh
    k_ptr += batch * stride_kb + kv_head * stride_kh
    v_ptr += batch * stride_vb + kv_head * stride_vh
    dout_ptr += batch * stride_gb + kv_head * GROUP * stride_gh
    logsumexp2_ptr += kv_index * GROUP * sequence + first
    delta_ptr += kv_index * GROUP * sequence + first
    if bias_ptr is not None:
        bias_ptr += kv_head * bias_stride_h
    written_start, written_stride = rows_written(
        kv_index, first, heads // GROUP, sequence, stride_wb, stride_wh, HEAD_DIM, ROW, PACKED
    )
    dk_ptr += written_start
    dv_ptr += written_start
    if PACKED:
        q_ptr += first.to(tl.int64) * stride_qs
        k_ptr += first.to(tl.int64) * stride_ks
        v_ptr += first.to(tl.int64) * stride_vs
        dout_ptr += first.to(tl.int64) * stride_gs
    k = load_rows(k_ptr, stride_ks, stride_kd, kv_start, length, BLOCK_KV, HEAD_DIM, False, True)
    v = load_rows(v_ptr, stride_vs, stride_vd, kv_start, length, BLOCK_KV, HEAD_DIM, False, True)
    dk = tl.zeros([BLOCK_KV, HEAD_DIM], tl.float32)
    dv = tl.zeros([BLOCK_KV, HEAD_DIM], tl.float32)

    begin, whole_from, whole_until, end = queries_seeing(kv_start, length, BLOCK_Q, BLOCK_KV, CAUSAL, WINDOW)
    # A loop of its own for masked tiles costs registers that head_dim 256 has not: there, one loop masks them all.
    MASK_ALL: tl.constexpr = CAUSAL and HEAD_DIM == 256
    for _ in range(GROUP):
        if DESCRIPTORS:
            q = tl.make_tensor_descriptor(q_ptr, [length, HEAD_DIM], [stride_qs, 1], [BLOCK_Q, HEAD_DIM])
            dout = tl.make_tensor_descriptor(dout_ptr, [length, HEAD_DIM], [stride_gs, 1], [BLOCK_Q, HEAD_DIM])
        else:
            q = q_ptr
            dout = dout_ptr
        if CAUSAL and not MASK_ALL:
            dk, dv = _add_queries(
                dk, dv, k, v, q, dout, logsumexp2_ptr, delta_ptr, stride_qs, stride_qd, stride_gs, stride_gd,
                bias_ptr, bias_stride_q, bias_stride_k, kv_start, begin, whole_from, length, scale_log2e,
                HEAD_DIM, BLOCK_Q, BLOCK_KV, CAUSAL, WINDOW, True, not EVEN, DESCRIPTORS, PRECISION,
            )
        dk, dv = _add_queries(
            dk, dv, k, v, q, dout, logsumexp2_ptr, delta_ptr, stride_qs, stride_qd, stride_gs, stride_gd,
            bias_ptr, bias_stride_q, bias_stride_k, kv_start,
            begin if MASK_ALL else whole_from, end if MASK_ALL else whole_until, length, scale_log2e,
            HEAD_DIM, BLOCK_Q, BLOCK_KV, CAUSAL, WINDOW, MASK_ALL, not EVEN, DESCRIPTORS, PRECISION,
        )
        if WINDOW and not MASK_ALL:
            dk, dv = _add_queries(
                dk, dv, k, v, q, dout, logsumexp2_ptr, delta_ptr, stride_qs, stride_qd, stride_gs, stride_gd,
                bias_ptr, bias_stride_q, bias_stride_k, kv_start, whole_until, end, length, scale_log2e,
                HEAD_DIM, BLOCK_Q, BLOCK_KV, CAUSAL, WINDOW, True, not EVEN, DESCRIPTORS, PRECISION,
            )
        q_ptr += stride_qh
        dout_ptr += stride_gh
        logsumexp2_ptr += sequence
        delta_ptr += sequence

    row = kv_start + tl.arange(0, BLOCK_KV)
    at = row[:, None] * written_stride + tl.arange(0, HEAD_DIM)[None, :]
    tl.store(dk_ptr + at, (dk * scale).to(dk_ptr.dtype.element_ty), mask=row[:, None] < length)
    tl.store(dv_ptr + at, dv.to(dv_ptr.dtype.element_ty), mask=row[:, None] < length)


@triton.jit
def _dscores(
    scores, dout, v, logsumexp2, delta, q_start, kv_start, sequence, scale_log2e,
    BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    MASKED: tl.constexpr, PRECISION: tl.constexpr,
):
    """ds [queries, keys] of scores that are not yet scaled."""
    p = tl.exp2(scores * scale_log2e - logsumexp2[:, None])
    if MASKED:
        row = q_start + tl.arange(0, BLOCK_Q)
        column = kv_start + tl.arange(0, BLOCK_KV)
        p = tl.where(sees(row[:, None], column[None, :], sequence, CAUSAL, WINDOW), p, 0.0)
    dp = product(dout, v.T, PRECISION)
    return p * (dp - delta[:, None])


@triton.jit
def _add_keys(
    dq, q, dout, logsumexp2, delta, k_source, v_source, stride_ks, stride_kd, stride_vs, stride_vd,
    bias_ptr, bias_stride_q, bias_stride_k, dbias_ptr, q_start, kv_begin, kv_end, sequence, scale_log2e,
    HEAD_DIM: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    MASKED: tl.constexpr, DESCRIPTORS: tl.constexpr, PRECISION: tl.constexpr,
):
    """Add what keys kv_begin .. kv_end contribute to dq (not yet scaled); their ds is dbias, if that is asked for. Only
    MASKED tiles may pass the end."""
    for kv_start in tl.range(kv_begin, kv_end, BLOCK_KV):
        k = load_rows(k_source, stride_ks, stride_kd, kv_start, sequence, BLOCK_KV, HEAD_DIM, DESCRIPTORS, MASKED)
        scores = product(q, k.T, PRECISION)
        if bias_ptr is not None:
            scores += bias_tile(
                bias_ptr, bias_stride_q, bias_stride_k, q_start, kv_start, sequence, HEAD_DIM, BLOCK_Q, BLOCK_KV
            )
        v = load_rows(v_source, stride_vs, stride_vd, kv_start, sequence, BLOCK_KV, HEAD_DIM, DESCRIPTORS, MASKED)
        ds = _dscores(
            scores, dout, v, logsumexp2, delta, q_start, kv_start, sequence, scale_log2e,
            BLOCK_Q, BLOCK_KV, CAUSAL, WINDOW, MASKED, PRECISION,
        )
        if dbias_ptr is not None:
            store_pairs(dbias_ptr, ds, q_start, kv_start, sequence, BLOCK_Q, BLOCK_KV)
        dq = add_product(dq, ds.to(k.dtype), k, PRECISION)
    return dq


@declare(*DQ, flops=products(3))
@triton.jit
def attention_dq_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, bias_ptr, logsumexp2_ptr, delta_ptr, dq_ptr, dbias_ptr, offsets_ptr,
    stride_qb, stride_qh, stride_qs, stride_qd, stride_kb, stride_kh, stride_ks, stride_kd,
    stride_vb, stride_vh, stride_vs, stride_vd, stride_gb, stride_gh, stride_gs, stride_gd,
    stride_wb, stride_wh, ROW: tl.constexpr, bias_stride_h, bias_stride_q, bias_stride_k,
    heads, sequence, sequences, PACKED: tl.constexpr, scale, scale_log2e,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr, DESCRIPTORS: tl.constexpr, PRECISION: tl.constexpr,
):
    """dq (whose columns lie side by side) of BLOCK_Q rows of one of the `heads`, GROUP of which share a head of k and
    v. Of a batch of one, dbias (contiguous) of these rows as well, if it is given."""
    head_index, tile, q_tiles, first, length = place(
        place_number(bias_ptr, sequence, heads, BLOCK_Q), sequence, offsets_ptr, sequences, BLOCK_Q, PACKED
    )
    if PACKED:
        if tile >= q_tiles:
            return
    batch = head_index // heads
    head = head_index % heads
    q_start = (q_tiles - 1 - tile) * BLOCK_Q  # the rows that see the most keys start first
    q_ptr += batch * stride_qb + head * stride_qh
    k_ptr += batch * stride_kb + head // GROUP * stride_kh
    v_ptr += batch * stride_vb + head // GROUP * stride_vh
    dout_ptr += batch * stride_gb + head * stride_gh
    logsumexp2_ptr += head_index * sequence + first
    delta_ptr += head_index * sequence + first
    if bias_ptr is not None:
        bias_ptr += head * bias_stride_h
    if dbias_ptr is not None:
        dbias_ptr += head * sequence * sequence
    dq_start, dq_stride = rows_written(
        head_index, first, heads, sequence, stride_wb, stride_wh, HEAD_DIM, ROW, PACKED
    )
    dq_ptr += dq_start
    if PACKED:
        q_ptr += first.to(tl.int64) * stride_qs
        k_ptr += first.to(tl.int64) * stride_ks
        v_ptr += first.to(tl.int64) * stride_vs
        dout_ptr += first.to(tl.int64) * stride_gs
    if DESCRIPTORS:
        k_source = tl.make_tensor_descriptor(k_ptr, [length, HEAD_DIM], [stride_ks, 1], [BLOCK_KV, HEAD_DIM])
        v_source = tl.make_tensor_descriptor(v_ptr, [length, HEAD_DIM], [stride_vs, 1], [BLOCK_KV, HEAD_DIM])
    else:
        k_source = k_ptr
        v_source = v_ptr

    q = load_rows(q_ptr, stride_qs, stride_qd, q_start, length, BLOCK_Q, HEAD_DIM, False, True)
    dout = load_rows(dout_ptr, stride_gs, stride_gd, q_start, length, BLOCK_Q, HEAD_DIM, False, True)
    row = q_start + tl.arange(0, BLOCK_Q)
    logsumexp2 = tl.load(logsumexp2_ptr + row, mask=row < length, other=0.0)
    delta = tl.load(delta_ptr + row, mask=row < length, other=0.0)
    dq = tl.zeros([BLOCK_Q, HEAD_DIM], tl.float32)
    begin, whole_from, whole_until, end = keys_seen(q_start, length, BLOCK_Q, BLOCK_KV, CAUSAL, WINDOW)
    if WINDOW:
        dq = _add_keys(
            dq, q, dout, logsumexp2, delta, k_source, v_source, stride_ks, stride_kd, stride_vs, stride_vd,
            bias_ptr, bias_stride_q, bias_stride_k, dbias_ptr, q_start, begin, whole_from, length, scale_log2e,
            HEAD_DIM, BLOCK_Q, BLOCK_KV, CAUSAL, WINDOW, True, DESCRIPTORS, PRECISION,
        )
    dq = _add_keys(
        dq, q, dout, logsumexp2, delta, k_source, v_source, stride_ks, stride_kd, stride_vs, stride_vd,
        bias_ptr, bias_stride_q, bias_stride_k, dbias_ptr, q_start, whole_from, whole_until, length, scale_log2e,
        HEAD_DIM, BLOCK_Q, BLOCK_KV, CAUSAL, WINDOW, False, DESCRIPTORS, PRECISION,
    )
    dq = _add_keys(
        dq, q, dout, logsumexp2, delta, k_source, v_source, stride_ks, stride_kd, stride_vs, stride_vd,
        bias_ptr, bias_stride_q, bias_stride_k, dbias_ptr, q_start, whole_until, end, length, scale_log2e,
        HEAD_DIM, BLOCK_Q, BLOCK_KV, CAUSAL, WINDOW, True, DESCRIPTORS, PRECISION,
    )
    at = row[:, None] * dq_stride + tl.arange(0, HEAD_DIM)[None, :]
    tl.store(dq_ptr + at, (dq * scale).to(dq_ptr.dtype.element_ty), mask=row[:, None] < length)


@declare(*DBIAS, flops=lambda given: 2 * 2 * math.prod(given["q_ptr"]) * given["sequence"])
@triton.jit
def attention_dbias_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, bias_ptr, logsumexp2_ptr, delta_ptr, dbias_ptr,
    stride_qb, stride_qh, stride_qs, stride_qd, stride_kb, stride_kh, stride_ks, stride_kd,
    stride_vb, stride_vh, stride_vs, stride_vd, stride_gb, stride_gh, stride_gs, stride_gd,
    bias_stride_h, bias_stride_q, bias_stride_k, batches, heads, sequence, scale_log2e,
    HEAD_DIM: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, PRECISION: tl.constexpr,
):
    """dbias (contiguous) of BLOCK_Q queries by BLOCK_KV keys of one head: the sum of ds over the batch."""
    kv_tiles = tl.cdiv(sequence, BLOCK_KV)
    tiles = tl.cdiv(sequence, BLOCK_Q) * kv_tiles
    head = (tl.program_id(0) // tiles).to(tl.int64)
    q_start = tl.program_id(0) % tiles // kv_tiles * BLOCK_Q
    kv_start = tl.program_id(0) % kv_tiles * BLOCK_KV
    q_ptr += head * stride_qh
    k_ptr += head * stride_kh
    v_ptr += head * stride_vh
    dout_ptr += head * stride_gh
    row = q_start + tl.arange(0, BLOCK_Q)
    row_ptr = head * sequence + row
    bias = bias_tile(
        bias_ptr + head * bias_stride_h, bias_stride_q, bias_stride_k, q_start, kv_start, sequence,
        HEAD_DIM, BLOCK_Q, BLOCK_KV,
    )
    total = tl.zeros([BLOCK_Q, BLOCK_KV], tl.float32)
    for _ in range(batches):
        q = load_rows(q_ptr, stride_qs, stride_qd, q_start, sequence, BLOCK_Q, HEAD_DIM, False, True)
        k = load_rows(k_ptr, stride_ks, stride_kd, kv_start, sequence, BLOCK_KV, HEAD_DIM, False, True)
        v = load_rows(v_ptr, stride_vs, stride_vd, kv_start, sequence, BLOCK_KV, HEAD_DIM, False, True)
        dout = load_rows(dout_ptr, stride_gs, stride_gd, q_start, sequence, BLOCK_Q, HEAD_DIM, False, True)
        logsumexp2 = tl.load(logsumexp2_ptr + row_ptr, mask=row < sequence, other=0.0)
        delta = tl.load(delta_ptr + row_ptr, mask=row < sequence, other=0.0)
        # Past the end the bias, and so every weight, is that of a key that is not seen.
        total += _dscores(
            product(q, k.T, PRECISION) + bias, dout, v, logsumexp2, delta, q_start, kv_start, sequence, scale_log2e,
            BLOCK_Q, BLOCK_KV, False, 0, False, PRECISION,
        )
        q_ptr += stride_qb
        k_ptr += stride_kb
        v_ptr += stride_vb
        dout_ptr += stride_gb
        row_ptr += heads * sequence
    store_pairs(dbias_ptr + head * sequence * sequence, total, q_start, kv_start, sequence, BLOCK_Q, BLOCK_KV)


def launch_delta(out: torch.Tensor, dout: torch.Tensor) -> torch.Tensor:
    """delta [batch, heads, sequence] in float32: sum(dout * out) over head_dim."""
    batch, heads, sequence, head_dim = out.shape
    delta = torch.empty((batch, heads, sequence), dtype=torch.float32, device=out.device)
    rows = 64
    with device_of(out):
        attention_delta_kernel[(batch * heads * cdiv(sequence, rows),)](
            out, dout, delta, *out.stride(), *dout.stride(), heads, sequence, HEAD_DIM=head_dim, ROWS=rows, num_warps=4
        )
    return delta


def launch_dk_dv(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor, logsumexp2: torch.Tensor,
    delta: torch.Tensor, config: TileConfig, causal: bool = True, window: int = 0,
    offsets: torch.Tensor | None = None, bias: torch.Tensor | None = None,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """dk, dv (see `empty_rows`), in the inputs' dtype. offsets: of packed sequences. out: where to write them, of the
    same strides, the last of which is 1."""
    strides = written_strides(*(out or (None, None)))
    dk, dv = out or (empty_rows(k, offsets), empty_rows(v, offsets))
    even = offsets is None and q.shape[2] % config.block_q == 0
    constants = {"EVEN": even, "CAUSAL": causal, "WINDOW": window}
    programs = programs_of(k, config.block_kv, offsets)
    given = (bias, logsumexp2, delta, dk, dv)
    with computing(*DK_DV_BY_CASE[causal, bias is not None]):
        _launch(attention_dk_dv_kernel, programs, (q, k, v, dout), given, strides, offsets, config, constants)
    return dk, dv


def launch_dq(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor, logsumexp2: torch.Tensor,
    delta: torch.Tensor, config: TileConfig, causal: bool = True, window: int = 0,
    offsets: torch.Tensor | None = None, bias: torch.Tensor | None = None, dbias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """dq (see `empty_rows`), in the inputs' dtype. offsets: of packed sequences. dbias: contiguous, written for a batch
    of one, if it is given. out: where to write dq, the last stride 1."""
    strides = written_strides(out)
    dq = empty_rows(q, offsets) if out is None else out
    constants = {"CAUSAL": causal, "WINDOW": window}
    programs = programs_of(q, config.block_q, offsets)
    given = (bias, logsumexp2, delta, dq, dbias)
    operations = DQ_BY_CASE if dbias is None else DQ_DBIAS_BY_CASE
    with computing(*operations[causal, bias is not None]):
        _launch(attention_dq_kernel, programs, (q, k, v, dout), given, strides, offsets, config, constants)
    return dq


def launch_dbias(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor, logsumexp2: torch.Tensor,
    delta: torch.Tensor, bias: torch.Tensor, dbias: torch.Tensor, config: TileConfig,
) -> None:
    """Write dbias [heads, sequence, sequence], contiguous, where no mask hides anything."""
    batch, heads, sequence, head_dim = q.shape
    strided = (q, k, v, dout, bias)
    programs = heads * cdiv(sequence, config.block_q) * cdiv(sequence, config.block_kv)
    with device_of(q), computing(*DBIAS_BY_CASE[False, True]):
        attention_dbias_kernel[(programs,)](
            *strided, logsumexp2, delta, dbias, *(stride for tensor in strided for stride in tensor.stride()),
            batch, heads, sequence, head_dim**-0.5 * LOG2_E.value, HEAD_DIM=head_dim, BLOCK_Q=config.block_q,
            BLOCK_KV=config.block_kv, PRECISION=product_precision(q.dtype), num_warps=config.num_warps,
            num_stages=config.num_stages,
        )


def _launch(
    kernel: triton.JITFunction, programs: int, strided: tuple[torch.Tensor, ...],
    given: tuple[torch.Tensor | None, ...], written: tuple[int, int, int], offsets: torch.Tensor | None,
    config: TileConfig, constants: dict[str, int],
) -> None:
    """Run one of the two large kernels. given: a bias, tensors whose strides the kernel knows, and what it writes, with
    the strides `written`."""
    q, k, *_ = strided
    bias = given[0]
    _, heads, sequence, head_dim = q.shape
    scale = head_dim**-0.5
    with device_of(q):
        if config.descriptors:
            provide_descriptor_memory(q.device)
        kernel[(programs,)](
            *strided, *given, offsets, *(stride for tensor in strided for stride in tensor.stride()),
            *written, *bias_strides(bias), heads, sequence, *packing(offsets), scale, scale * LOG2_E.value,
            GROUP=heads // k.shape[1], HEAD_DIM=head_dim, BLOCK_Q=config.block_q, BLOCK_KV=config.block_kv,
            DESCRIPTORS=config.descriptors, PRECISION=product_precision(q.dtype), **constants,
            num_warps=config.num_warps, num_stages=config.num_stages,
        )
