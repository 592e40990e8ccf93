"""Gradient of attention as Triton kernels (Dao et al., "FlashAttention-2", arXiv:2307.08691).

With p = softmax(masked(scale * q k^T + bias)), dout the gradient of out = p v, and delta[row] the sum of dout * out
over head_dim:

    dv = p^T dout        ds = p * (dout v^T - delta)        dq = scale * ds k        dk = scale * ds^T q
    dbias = sum of ds over the batch

The kernels recompute p from q, k and the forward pass's logsumexp2:

- The dk, dv kernel keeps a tile of keys. It loops over the queries to which the tile is visible, in all heads that
  share it. Where such tiles are few, splits divide these heads (`shared/head_splits.py`).
- The dq kernel keeps a tile of queries and loops over the visible keys.
- The dbias kernel computes tile after tile, each in a loop over the batch. bias and dbias then move once, and no ds
  [batch, heads, sequence, sequence] is in memory. It computes ds again, with two products. With batch size 1, ds equals
  dbias, and the dq kernel stores it.

The first two take seven products where a single kernel takes five. They need no atomics, so every run gives the same
results.

Shapes and dtypes as in `attention.py`; delta [batch, heads, sequence], float32.
"""

import math

import torch
import triton
import triton.language as tl

from xlafuse.triton_side.calls.declare import computing, declare
from xlafuse.triton_side.kernels.shared.attention_configs import TileConfig, attention_precision
from xlafuse.triton_side.kernels.shared.attention_operations import (
    DBIAS,
    DBIAS_BY_CASE,
    DELTA,
    DK_DV,
    DK_DV_BY_CASE,
    DQ,
    DQ_BY_CASE,
    DQ_DBIAS_BY_CASE,
    products_flops,
)
from xlafuse.triton_side.kernels.shared.attention_tiles import (
    bias_strides,
    empty_output,
    is_visible,
    load_bias,
    output_offset,
    output_strides,
    packed_sizes,
    program_count,
    program_number,
    rows_of_head,
    store_scores,
    tile_of_program,
    visible_keys,
    visible_queries,
)
from xlafuse.triton_side.kernels.shared.constants import LOG2_E
from xlafuse.triton_side.kernels.shared.head_splits import SUMS, choose_splits, empty_sums, launch_sum_splits
from xlafuse.triton_side.kernels.shared.launch import cdiv, device_of, multiprocessors
from xlafuse.triton_side.kernels.shared.tiles import (
    add_product,
    load_rows,
    product,
    provide_descriptor_memory,
)

WARPS_AT_ONCE = 8  # of a multiprocessor in the dbias kernel, whose threads take up to 255 registers


@declare(*DELTA, flops=lambda shapes: 2 * math.prod(shapes["out_ptr"]))
@triton.jit
def attention_delta_kernel(
    out_ptr, dout_ptr, delta_ptr, stride_ob, stride_oh, stride_os, stride_od, stride_gb, stride_gh, stride_gs,
    stride_gd, heads, sequence, HEAD_DIM: tl.constexpr, ROWS: tl.constexpr,
):
    """Compute delta[row] = sum(dout * out) for ROWS rows of one head."""
    tiles = tl.cdiv(sequence, ROWS)
    head_index = (tl.program_id(0) // tiles).to(tl.int64)
    batch = head_index // heads
    head = head_index % heads
    start = tl.program_id(0) % tiles * ROWS
    out_ptr += batch * stride_ob + head * stride_oh
    dout_ptr += batch * stride_gb + head * stride_gh
    out = load_rows((out_ptr, stride_os, stride_od), start, sequence, ROWS, HEAD_DIM, False, True)
    dout = load_rows((dout_ptr, stride_gs, stride_gd), start, sequence, ROWS, HEAD_DIM, False, True)
    row = start + tl.arange(0, ROWS)
    delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), axis=1)
    tl.store(delta_ptr + head_index * sequence + row, delta, mask=row < sequence)


@triton.jit
def _add_queries(
    gradients, k, v, queries, douts, logsumexp2_ptr, delta_ptr, bias, kv_start, q_begin, q_end, sequence, scale_log2e,
    HEAD_DIM: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    MASKED: tl.constexpr, CHECK: tl.constexpr, DESCRIPTORS: tl.constexpr, PRECISION: tl.constexpr,
):
    """Add the contribution of queries q_begin .. q_end to `gradients`: dk, not yet scaled, and dv.

    Tiles are [keys, queries]. queries, douts: as `load_rows` takes them. bias: as `load_bias` takes it.
    """
    dk, dv = gradients
    for q_start in tl.range(q_begin, q_end, BLOCK_Q):
        row = q_start + tl.arange(0, BLOCK_Q)
        q = load_rows(queries, q_start, sequence, BLOCK_Q, HEAD_DIM, DESCRIPTORS, CHECK)
        # Past the end q and dout are zero, so any finite logsumexp2 and delta contribute zero.
        if CHECK:
            logsumexp2 = tl.load(logsumexp2_ptr + row, mask=row < sequence, other=0.0)
            delta = tl.load(delta_ptr + row, mask=row < sequence, other=0.0)
        else:
            logsumexp2 = tl.load(logsumexp2_ptr + row)
            delta = tl.load(delta_ptr + row)
        dout = load_rows(douts, q_start, sequence, BLOCK_Q, HEAD_DIM, DESCRIPTORS, CHECK)
        scores = product(k, q.T, PRECISION)
        if bias[0] is not None:
            scores += load_bias(bias, q_start, kv_start, sequence, HEAD_DIM, BLOCK_Q, BLOCK_KV).T
        p = tl.exp2(scores * scale_log2e - logsumexp2[None, :])
        if MASKED:
            column = kv_start + tl.arange(0, BLOCK_KV)
            p = tl.where(is_visible(row[None, :], column[:, None], sequence, CAUSAL, WINDOW), p, 0.0)
        dv = add_product(dv, p.to(dout.dtype), dout, PRECISION)
        dp = product(v, dout.T, PRECISION)
        ds = p * (dp - delta[None, :])
        dk = add_product(dk, ds.to(q.dtype), q, PRECISION)
    return dk, dv


@declare(*DK_DV, flops=products_flops(4))
@triton.jit
def attention_dk_dv_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, bias_ptr, logsumexp2_ptr, delta_ptr, dk_ptr, dv_ptr, offsets_ptr,
    stride_qb, stride_qh, stride_qs, stride_qd, stride_kb, stride_kh, stride_ks, stride_kd,
    stride_vb, stride_vh, stride_vs, stride_vd, stride_gb, stride_gh, stride_gs, stride_gd,
    stride_wb, stride_wh, ROW: tl.constexpr, bias_stride_h, bias_stride_q, bias_stride_k,
    heads, sequence, sequences, PACKED: tl.constexpr, scale, scale_log2e,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr, EVEN: tl.constexpr, SPLITS: tl.constexpr, DESCRIPTORS: tl.constexpr, PRECISION: tl.constexpr,
):
    """Compute dk and dv of BLOCK_KV rows of one head of k and v, from GROUP of the `heads`.

    GROUP * SPLITS heads share a head of k and v, whose splits have heads of dk and dv of their own, one after the
    other. dk and dv have the same strides, with contiguous columns. EVEN: BLOCK_Q divides the sequence.
    """
    # One head's tiles start together. The first keys, visible to the most queries, start first.
    kv_index, tile, kv_tiles, first, length = tile_of_program(
        program_number(bias_ptr, sequence, heads, BLOCK_KV), sequence, offsets_ptr, sequences, BLOCK_KV, PACKED
    )
    if PACKED:
        if tile >= kv_tiles:
            return
    batch = kv_index // (heads // GROUP)
    kv_head = kv_index % (heads // GROUP)
    kv_start = tile * BLOCK_KV
    q_ptr = rows_of_head(q_ptr, (stride_qb, stride_qh, stride_qs), batch, kv_head * GROUP, first, PACKED)
    k_ptr = rows_of_head(k_ptr, (stride_kb, stride_kh, stride_ks), batch, kv_head // SPLITS, first, PACKED)
    v_ptr = rows_of_head(v_ptr, (stride_vb, stride_vh, stride_vs), batch, kv_head // SPLITS, first, PACKED)
    dout_ptr = rows_of_head(dout_ptr, (stride_gb, stride_gh, stride_gs), batch, kv_head * GROUP, first, PACKED)
    logsumexp2_ptr += kv_index * GROUP * sequence + first
    delta_ptr += kv_index * GROUP * sequence + first
    if bias_ptr is not None:
        bias_ptr += kv_head * bias_stride_h
    bias = (bias_ptr, bias_stride_q, bias_stride_k)
    output_start, output_stride = output_offset(
        kv_index, first, heads // GROUP, sequence, stride_wb, stride_wh, HEAD_DIM, ROW, PACKED
    )
    dk_ptr += output_start
    dv_ptr += output_start
    k = load_rows((k_ptr, stride_ks, stride_kd), kv_start, length, BLOCK_KV, HEAD_DIM, False, True)
    v = load_rows((v_ptr, stride_vs, stride_vd), kv_start, length, BLOCK_KV, HEAD_DIM, False, True)
    dk = tl.zeros([BLOCK_KV, HEAD_DIM], tl.float32)
    dv = tl.zeros([BLOCK_KV, HEAD_DIM], tl.float32)
    gradients = (dk, dv)

    begin, whole_from, whole_until, end = visible_queries(kv_start, length, BLOCK_Q, BLOCK_KV, CAUSAL, WINDOW)
    # A separate loop for masked tiles costs registers, too many at head_dim 256. There, one loop masks all tiles.
    MASK_ALL: tl.constexpr = CAUSAL and HEAD_DIM == 256
    for _ in range(GROUP):
        if DESCRIPTORS:
            q_source = tl.make_tensor_descriptor(q_ptr, [length, HEAD_DIM], [stride_qs, 1], [BLOCK_Q, HEAD_DIM])
            dout_source = tl.make_tensor_descriptor(dout_ptr, [length, HEAD_DIM], [stride_gs, 1], [BLOCK_Q, HEAD_DIM])
        else:
            q_source = q_ptr
            dout_source = dout_ptr
        queries = (q_source, stride_qs, stride_qd)
        douts = (dout_source, stride_gs, stride_gd)
        if CAUSAL and not MASK_ALL:
            gradients = _add_queries(
                gradients, k, v, queries, douts, logsumexp2_ptr, delta_ptr, bias,
                kv_start, begin, whole_from, length, scale_log2e,
                HEAD_DIM, BLOCK_Q, BLOCK_KV, CAUSAL, WINDOW, True, not EVEN, DESCRIPTORS, PRECISION,
            )
        gradients = _add_queries(
            gradients, k, v, queries, douts, logsumexp2_ptr, delta_ptr, bias,
            kv_start, begin if MASK_ALL else whole_from, end if MASK_ALL else whole_until, length, scale_log2e,
            HEAD_DIM, BLOCK_Q, BLOCK_KV, CAUSAL, WINDOW, MASK_ALL, not EVEN, DESCRIPTORS, PRECISION,
        )
        if WINDOW and not MASK_ALL:
            gradients = _add_queries(
                gradients, k, v, queries, douts, logsumexp2_ptr, delta_ptr, bias,
                kv_start, whole_until, end, length, scale_log2e,
                HEAD_DIM, BLOCK_Q, BLOCK_KV, CAUSAL, WINDOW, True, not EVEN, DESCRIPTORS, PRECISION,
            )
        q_ptr += stride_qh
        dout_ptr += stride_gh
        logsumexp2_ptr += sequence
        delta_ptr += sequence

    dk, dv = gradients
    row = kv_start + tl.arange(0, BLOCK_KV)
    offset = row[:, None] * output_stride + tl.arange(0, HEAD_DIM)[None, :]
    tl.store(dk_ptr + offset, (dk * scale).to(dk_ptr.dtype.element_ty), mask=row[:, None] < length)
    tl.store(dv_ptr + offset, dv.to(dv_ptr.dtype.element_ty), mask=row[:, None] < length)


@triton.jit
def _dscores(
    scores, dout, v, logsumexp2, delta, q_start, kv_start, sequence, scale_log2e,
    BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    MASKED: tl.constexpr, PRECISION: tl.constexpr,
):
    """Return ds [queries, keys] from scores that are not yet scaled."""
    p = tl.exp2(scores * scale_log2e - logsumexp2[:, None])
    if MASKED:
        row = q_start + tl.arange(0, BLOCK_Q)
        column = kv_start + tl.arange(0, BLOCK_KV)
        p = tl.where(is_visible(row[:, None], column[None, :], sequence, CAUSAL, WINDOW), p, 0.0)
    dp = product(dout, v.T, PRECISION)
    return p * (dp - delta[:, None])


@triton.jit
def _add_keys(
    dq, queries, keys, values, bias, dbias_ptr, q_start, kv_begin, kv_end, sequence, scale_log2e,
    HEAD_DIM: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    MASKED: tl.constexpr, DESCRIPTORS: tl.constexpr, PRECISION: tl.constexpr,
):
    """Add the contribution of keys kv_begin .. kv_end to dq, not yet scaled, and store their ds to a given dbias.

    Only MASKED tiles may pass the end. queries: (q, dout, logsumexp2, delta) of the rows. keys, values: as `load_rows`
    takes them. bias: as `load_bias` takes it.
    """
    q, dout, logsumexp2, delta = queries
    for kv_start in tl.range(kv_begin, kv_end, BLOCK_KV):
        k = load_rows(keys, kv_start, sequence, BLOCK_KV, HEAD_DIM, DESCRIPTORS, MASKED)
        scores = product(q, k.T, PRECISION)
        if bias[0] is not None:
            scores += load_bias(bias, q_start, kv_start, sequence, HEAD_DIM, BLOCK_Q, BLOCK_KV)
        v = load_rows(values, kv_start, sequence, BLOCK_KV, HEAD_DIM, DESCRIPTORS, MASKED)
        ds = _dscores(
            scores, dout, v, logsumexp2, delta, q_start, kv_start, sequence, scale_log2e,
            BLOCK_Q, BLOCK_KV, CAUSAL, WINDOW, MASKED, PRECISION,
        )
        if dbias_ptr is not None:
            store_scores(dbias_ptr, ds, q_start, kv_start, sequence, BLOCK_Q, BLOCK_KV)
        dq = add_product(dq, ds.to(k.dtype), k, PRECISION)
    return dq


@declare(*DQ, flops=products_flops(3))
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
    """Compute dq, whose columns are contiguous, for BLOCK_Q rows of one head; GROUP heads share a head of k and v.

    With batch size 1, store these rows of a given, contiguous dbias too.
    """
    head_index, tile, q_tiles, first, length = tile_of_program(
        program_number(bias_ptr, sequence, heads, BLOCK_Q), sequence, offsets_ptr, sequences, BLOCK_Q, PACKED
    )
    if PACKED:
        if tile >= q_tiles:
            return
    batch = head_index // heads
    head = head_index % heads
    q_start = (q_tiles - 1 - tile) * BLOCK_Q  # the rows with the most visible keys start first
    q_ptr = rows_of_head(q_ptr, (stride_qb, stride_qh, stride_qs), batch, head, first, PACKED)
    k_ptr = rows_of_head(k_ptr, (stride_kb, stride_kh, stride_ks), batch, head // GROUP, first, PACKED)
    v_ptr = rows_of_head(v_ptr, (stride_vb, stride_vh, stride_vs), batch, head // GROUP, first, PACKED)
    dout_ptr = rows_of_head(dout_ptr, (stride_gb, stride_gh, stride_gs), batch, head, first, PACKED)
    logsumexp2_ptr += head_index * sequence + first
    delta_ptr += head_index * sequence + first
    if bias_ptr is not None:
        bias_ptr += head * bias_stride_h
    bias = (bias_ptr, bias_stride_q, bias_stride_k)
    if dbias_ptr is not None:
        dbias_ptr += head * sequence * sequence
    dq_start, dq_stride = output_offset(
        head_index, first, heads, sequence, stride_wb, stride_wh, HEAD_DIM, ROW, PACKED
    )
    dq_ptr += dq_start
    if DESCRIPTORS:
        k_source = tl.make_tensor_descriptor(k_ptr, [length, HEAD_DIM], [stride_ks, 1], [BLOCK_KV, HEAD_DIM])
        v_source = tl.make_tensor_descriptor(v_ptr, [length, HEAD_DIM], [stride_vs, 1], [BLOCK_KV, HEAD_DIM])
    else:
        k_source = k_ptr
        v_source = v_ptr
    keys = (k_source, stride_ks, stride_kd)
    values = (v_source, stride_vs, stride_vd)

    q = load_rows((q_ptr, stride_qs, stride_qd), q_start, length, BLOCK_Q, HEAD_DIM, False, True)
    dout = load_rows((dout_ptr, stride_gs, stride_gd), q_start, length, BLOCK_Q, HEAD_DIM, False, True)
    row = q_start + tl.arange(0, BLOCK_Q)
    logsumexp2 = tl.load(logsumexp2_ptr + row, mask=row < length, other=0.0)
    delta = tl.load(delta_ptr + row, mask=row < length, other=0.0)
    queries = (q, dout, logsumexp2, delta)
    dq = tl.zeros([BLOCK_Q, HEAD_DIM], tl.float32)
    begin, whole_from, whole_until, end = visible_keys(q_start, length, BLOCK_Q, BLOCK_KV, CAUSAL, WINDOW)
    if WINDOW:
        dq = _add_keys(
            dq, queries, keys, values, bias, dbias_ptr, q_start, begin, whole_from, length, scale_log2e,
            HEAD_DIM, BLOCK_Q, BLOCK_KV, CAUSAL, WINDOW, True, DESCRIPTORS, PRECISION,
        )
    dq = _add_keys(
        dq, queries, keys, values, bias, dbias_ptr, q_start, whole_from, whole_until, length, scale_log2e,
        HEAD_DIM, BLOCK_Q, BLOCK_KV, CAUSAL, WINDOW, False, DESCRIPTORS, PRECISION,
    )
    dq = _add_keys(
        dq, queries, keys, values, bias, dbias_ptr, q_start, whole_until, end, length, scale_log2e,
        HEAD_DIM, BLOCK_Q, BLOCK_KV, CAUSAL, WINDOW, True, DESCRIPTORS, PRECISION,
    )
    offset = row[:, None] * dq_stride + tl.arange(0, HEAD_DIM)[None, :]
    tl.store(dq_ptr + offset, (dq * scale).to(dq_ptr.dtype.element_ty), mask=row[:, None] < length)


@triton.jit
def _tiles_of_heads(
    pointer, strides, batches, heads, sequence, BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr, DESCRIPTOR: tl.constexpr
):
    """Return a descriptor of one head's tiles, or the pointer."""
    if DESCRIPTOR:
        return tl.make_tensor_descriptor(
            pointer, [batches, heads, sequence, HEAD_DIM], [strides[0], strides[1], strides[2], 1],
            [1, 1, BLOCK, HEAD_DIM],
        )
    else:
        return pointer


@triton.jit
def _load_of_head(
    source, strides, batch, head, start, sequence, BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr, DESCRIPTOR: tl.constexpr
):
    """Return rows start .. start + BLOCK of one head, zero past its end. source: of `_tiles_of_heads`."""
    if DESCRIPTOR:
        return source.load([tl.cast(batch, tl.int32), tl.cast(head, tl.int32), start, 0]).reshape([BLOCK, HEAD_DIM])
    else:
        pointer = rows_of_head(source, strides, batch, head, 0, 0)
        return load_rows((pointer, strides[2], strides[3]), start, sequence, BLOCK, HEAD_DIM, False, True)


@declare(*DBIAS, flops=lambda shapes: 2 * 2 * math.prod(shapes["q_ptr"]) * shapes["sequence"])
@triton.jit
def attention_dbias_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, bias_ptr, logsumexp2_ptr, delta_ptr, dbias_ptr,
    stride_qb, stride_qh, stride_qs, stride_qd, stride_kb, stride_kh, stride_ks, stride_kd,
    stride_vb, stride_vh, stride_vs, stride_vd, stride_gb, stride_gh, stride_gs, stride_gd,
    bias_stride_h, bias_stride_q, bias_stride_k, batches, heads, sequence, scale_log2e,
    HEAD_DIM: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, DESCRIPTORS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute a contiguous dbias, the sum of ds over the batch.

    A program computes tiles of BLOCK_Q queries by BLOCK_KV keys of one head, one after the other in a single loop over
    tiles and batch, so the next tile's rows are on their way when one ends.
    """
    q_strides = (stride_qb, stride_qh, stride_qs, stride_qd)
    k_strides = (stride_kb, stride_kh, stride_ks, stride_kd)
    v_strides = (stride_vb, stride_vh, stride_vs, stride_vd)
    dout_strides = (stride_gb, stride_gh, stride_gs, stride_gd)
    queries = _tiles_of_heads(q_ptr, q_strides, batches, heads, sequence, BLOCK_Q, HEAD_DIM, DESCRIPTORS)
    keys = _tiles_of_heads(k_ptr, k_strides, batches, heads, sequence, BLOCK_KV, HEAD_DIM, DESCRIPTORS)
    values = _tiles_of_heads(v_ptr, v_strides, batches, heads, sequence, BLOCK_KV, HEAD_DIM, DESCRIPTORS)
    douts = _tiles_of_heads(dout_ptr, dout_strides, batches, heads, sequence, BLOCK_Q, HEAD_DIM, DESCRIPTORS)
    kv_tiles = tl.cdiv(sequence, BLOCK_KV)
    head_tiles = tl.cdiv(sequence, BLOCK_Q) * kv_tiles
    tiles = tl.cdiv(heads * head_tiles - tl.program_id(0), tl.num_programs(0))
    row = tl.arange(0, BLOCK_Q)
    total = tl.zeros([BLOCK_Q, BLOCK_KV], tl.float32)
    for step in tl.range(0, tiles * batches):
        batch = step % batches
        tile = tl.program_id(0) + step // batches * tl.num_programs(0)
        head = (tile // head_tiles).to(tl.int64)
        q_start = tile % head_tiles // kv_tiles * BLOCK_Q
        kv_start = tile % kv_tiles * BLOCK_KV
        q = _load_of_head(queries, q_strides, batch, head, q_start, sequence, BLOCK_Q, HEAD_DIM, DESCRIPTORS)
        k = _load_of_head(keys, k_strides, batch, head, kv_start, sequence, BLOCK_KV, HEAD_DIM, DESCRIPTORS)
        v = _load_of_head(values, v_strides, batch, head, kv_start, sequence, BLOCK_KV, HEAD_DIM, DESCRIPTORS)
        dout = _load_of_head(douts, dout_strides, batch, head, q_start, sequence, BLOCK_Q, HEAD_DIM, DESCRIPTORS)
        first_row = (batch * heads + head) * sequence + q_start
        logsumexp2 = tl.load(logsumexp2_ptr + first_row + row, mask=row < sequence - q_start, other=0.0)
        delta = tl.load(delta_ptr + first_row + row, mask=row < sequence - q_start, other=0.0)
        # Past the end the bias is -inf, so every weight is 0.
        bias = (bias_ptr + head * bias_stride_h, bias_stride_q, bias_stride_k)
        scores = product(q, k.T, PRECISION) + load_bias(
            bias, q_start, kv_start, sequence, HEAD_DIM, BLOCK_Q, BLOCK_KV
        )
        ds = _dscores(
            scores, dout, v, logsumexp2, delta, q_start, kv_start, sequence, scale_log2e, BLOCK_Q, BLOCK_KV, False, 0,
            False, PRECISION,
        )
        total = tl.where(batch == 0, ds, total + ds)
        if batch == batches - 1:
            store_scores(dbias_ptr + head * sequence * sequence, total, q_start, kv_start, sequence, BLOCK_Q, BLOCK_KV)


def launch_delta(out: torch.Tensor, dout: torch.Tensor) -> torch.Tensor:
    """Return delta [batch, heads, sequence] in float32: sum(dout * out) over head_dim."""
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
    out: tuple[torch.Tensor, torch.Tensor] | None = None, splits: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return dk and dv, made by `empty_output`, in the inputs' dtype.

    offsets: of packed sequences, which have no splits. out: memory for both, of the same strides, with last stride 1.
    splits: as in `choose_splits`.
    """
    splits = choose_splits(q, k, config.block_kv, causal, window, offsets, splits)
    dk, dv = out or (empty_output(k, offsets), empty_output(v, offsets))
    sums = empty_sums(k, splits) if splits > 1 else None
    strides = output_strides(*(sums or out or (None, None)))
    even = offsets is None and q.shape[2] % config.block_q == 0
    constants = {"EVEN": even, "CAUSAL": causal, "WINDOW": window, "SPLITS": splits}
    programs = program_count(k, config.block_kv, offsets) * splits
    others = (bias, logsumexp2, delta, *(sums or (dk, dv)))
    group = q.shape[1] // k.shape[1] // splits
    with computing(*DK_DV_BY_CASE[causal, bias is not None], **(SUMS if sums else {})):
        _launch(attention_dk_dv_kernel, programs, (q, k, v, dout), others, strides, offsets, config, group, constants)
    if sums:
        launch_sum_splits(sums, dk, dv)
    return dk, dv


def launch_dq(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor, logsumexp2: torch.Tensor,
    delta: torch.Tensor, config: TileConfig, causal: bool = True, window: int = 0,
    offsets: torch.Tensor | None = None, bias: torch.Tensor | None = None, dbias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return dq, made by `empty_output`, in the inputs' dtype.

    offsets: of packed sequences. dbias: contiguous, written with batch size 1. out: memory for dq, with last stride 1.
    """
    strides = output_strides(out)
    dq = empty_output(q, offsets) if out is None else out
    constants = {"CAUSAL": causal, "WINDOW": window}
    programs = program_count(q, config.block_q, offsets)
    others = (bias, logsumexp2, delta, dq, dbias)
    operations = DQ_BY_CASE if dbias is None else DQ_DBIAS_BY_CASE
    group = q.shape[1] // k.shape[1]
    with computing(*operations[causal, bias is not None]):
        _launch(attention_dq_kernel, programs, (q, k, v, dout), others, strides, offsets, config, group, constants)
    return dq


def launch_dbias(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor, logsumexp2: torch.Tensor,
    delta: torch.Tensor, bias: torch.Tensor, dbias: torch.Tensor, config: TileConfig,
) -> None:
    """Write dbias [heads, sequence, sequence], contiguous, without a mask."""
    batch, heads, sequence, head_dim = q.shape
    strided = (q, k, v, dout, bias)
    tiles = heads * cdiv(sequence, config.block_q) * cdiv(sequence, config.block_kv)
    programs = min(tiles, multiprocessors(q.device) * max(1, WARPS_AT_ONCE // config.num_warps))
    with device_of(q), computing(*DBIAS_BY_CASE[False, True]):
        if config.descriptors:
            provide_descriptor_memory(q.device)
        attention_dbias_kernel[(programs,)](
            *strided, logsumexp2, delta, dbias, *(stride for tensor in strided for stride in tensor.stride()),
            batch, heads, sequence, head_dim**-0.5 * LOG2_E.value, HEAD_DIM=head_dim, BLOCK_Q=config.block_q,
            BLOCK_KV=config.block_kv, DESCRIPTORS=config.descriptors,
            PRECISION=attention_precision(q.dtype, head_dim), num_warps=config.num_warps, num_stages=config.num_stages,
        )


def _launch(
    kernel: triton.JITFunction, programs: int, strided: tuple[torch.Tensor, ...],
    others: tuple[torch.Tensor | None, ...], written: tuple[int, int, int], offsets: torch.Tensor | None,
    config: TileConfig, group: int, constants: dict[str, int],
) -> None:
    """Launch the dk, dv kernel or the dq kernel.

    strided: tensors passed with their strides. others: the bias, contiguous tensors, and the outputs. written: strides
    of the outputs. group: the kernel's GROUP.
    """
    q = strided[0]
    bias = others[0]
    _, heads, sequence, head_dim = q.shape
    scale = head_dim**-0.5
    with device_of(q):
        if config.descriptors:
            provide_descriptor_memory(q.device)
        kernel[(programs,)](
            *strided, *others, offsets, *(stride for tensor in strided for stride in tensor.stride()),
            *written, *bias_strides(bias), heads, sequence, *packed_sizes(offsets), scale, scale * LOG2_E.value,
            GROUP=group, HEAD_DIM=head_dim, BLOCK_Q=config.block_q, BLOCK_KV=config.block_kv,
            DESCRIPTORS=config.descriptors, PRECISION=attention_precision(q.dtype, head_dim), **constants,
            num_warps=config.num_warps, num_stages=config.num_stages,
        )
