"""Gradient of attention for Hopper GPUs: dq, dk and dv from q, k, v, out, dout and logsumexp2.

The formulas are those of `kernels/attention_backward.py`. A single kernel makes all three gradients with five products,
where the portable kernels take seven:

- A program owns 128 keys of one head of k and v and loops over the queries that see them, 64 at a time, in all heads
  that share these keys. Where such programs are few, splits divide these heads (`shared/head_splits.py`). A producer
  warp loads by TMA. Two consumers of four warps own 64 keys each.
- Scores and their gradients are transposed, [keys, queries]. The weights and ds are then operands in registers for dv
  and dk, which stay in registers.
- ds also goes to shared memory. dq of a tile of queries is a product with the ds of both consumers. Consumers add it to
  a float32 buffer in memory with 16-byte atomics, in the order of their registers. The sum's order, and so its last
  bits, differ from run to run.

`hopper_attention_before_kernel` computes delta and fills the buffer with zeros. `hopper_attention_after_kernel` brings
dq into its order and dtype.

Rows past the end need no masks. TMA loads zeros, and their logsumexp2 is infinite, so their weights are zero.

Shapes: q, out, dout, dq [batch, heads, sequence, head_dim]; k, v, dk, dv [batch, kv_heads, sequence, head_dim]. dtypes:
bfloat16, float16. head_dim: 64, 128, 256.
"""

import math
from collections.abc import Callable

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma as mma
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma_wait as mma_wait

from xlafuse.triton_side.calls.declare import Shapes, computing, declare, gradient
from xlafuse.triton_side.kernels.hopper.parts import (
    L2_BYTES,
    barriers,
    buffers,
    descriptor,
    matrix,
    packed_place,
    rows_descriptor,
    store_pairs,
    store_rows,
    thread_barrier,
)
from xlafuse.triton_side.kernels.shared.attention_operations import BACKWARD, BACKWARD_BY_CASE, DELTA, products_flops
from xlafuse.triton_side.kernels.shared.attention_tiles import empty_output, packed_sizes, rows_of_head, tile_of_program
from xlafuse.triton_side.kernels.shared.constants import LOG2_E
from xlafuse.triton_side.kernels.shared.head_splits import SUMS, choose_splits, empty_sums, launch_sum_splits
from xlafuse.triton_side.kernels.shared.launch import cdiv, device_of, multiprocessors
from xlafuse.triton_side.kernels.shared.tiles import load_rows

KEYS = {64: 128, 128: 128, 256: 64}  # of a program, by head_dim
QUERIES = gl.constexpr(64)  # of a tile
ROWS = gl.constexpr(64)  # keys of one consumer
SLOT = gl.constexpr(128)  # keys, or two tiles of queries, by which tiles are numbered
COLUMNS = gl.constexpr(64)  # of dq that a consumer computes at a time
STATS_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=3)
SCALED = gradient("div", "scores", "dq")


@gluon.jit
def _exp2(x):
    """Return 2^x. gl.exp2 takes four instructions, for denormal results."""
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _pack(x, dtype: gl.constexpr):
    """Return x in `dtype`, two numbers an instruction.

    If the result is also used elementwise, LLVM would convert one number at a time, in the pipe of the exponentials.
    """
    if dtype == gl.bfloat16:
        asm: gl.constexpr = "cvt.rn.bf16x2.f32 $0, $2, $1;"
        x = gl.inline_asm_elementwise(asm, "=r,r,r", [x], dtype=gl.bfloat16, is_pure=True, pack=2)
    else:
        x = x.to(dtype)
    return x


@gluon.jit
def _unpack(x):
    """Return x in float32, two numbers a time."""
    if x.dtype == gl.bfloat16:
        asm: gl.constexpr = "{.reg .b32 t; shl.b32 t, $2, 16; mov.b32 $0, t; and.b32 t, $2, 0xffff0000; mov.b32 $1, t;}"
        x = gl.inline_asm_elementwise(asm, "=f,=f,r", [x], dtype=gl.float32, is_pure=True, pack=2)
    else:
        x = x.to(gl.float32)
    return x


@gluon.jit
def _produce(
    place, sizes, smem, bars, q_descriptor, k_descriptor, v_descriptor, dout_descriptor, stats_descriptor,
    SPLITS: gl.constexpr,
):
    """Load k and v once, and the tiles of q, dout and their numbers for each head that shares them."""
    kv_index, n, first_row, first_tile, begin, per_head = place
    kv_heads, sharing, tiles_of_head = sizes
    k_smem, v_smem, q_smem, dout_smem, stats_smem, ds0, ds1, numbers = smem
    kv_full, q_full, dout_full, empty, ds_full0, ds_full1 = bars
    BLOCKS: gl.constexpr = k_smem.shape[0]
    batch = kv_index // kv_heads
    kv_head = kv_index % kv_heads
    key = first_row + n * (BLOCKS * ROWS)
    mbarrier.expect(kv_full.index(0), BLOCKS * k_descriptor.block_type.nbytes)
    mbarrier.expect(kv_full.index(1), BLOCKS * k_descriptor.block_type.nbytes)
    for j in gl.static_range(BLOCKS):
        tma.async_copy_global_to_shared(
            k_descriptor, [batch, kv_head // SPLITS, key + j * ROWS, 0], kv_full.index(0), k_smem.index(j)
        )
    for g in range(per_head * sharing):
        shared = g // per_head
        tile = begin + g % per_head
        head = kv_head * sharing + shared
        row = first_row + tile * QUERIES
        i = g % 2
        mbarrier.wait(empty.index(i), (g // 2 & 1) ^ 1)
        mbarrier.expect(q_full.index(i), q_descriptor.block_type.nbytes + stats_descriptor.block_type.nbytes)
        tma.async_copy_global_to_shared(q_descriptor, [batch, head, row, 0], q_full.index(i), q_smem.index(i))
        number = (kv_index * sharing + shared) * tiles_of_head + first_tile + tile
        tma.async_copy_global_to_shared(stats_descriptor, [number, 0, 0], q_full.index(i), stats_smem.index(i))
        if g == 0:
            for j in gl.static_range(BLOCKS):
                tma.async_copy_global_to_shared(
                    v_descriptor, [batch, kv_head // SPLITS, key + j * ROWS, 0], kv_full.index(1), v_smem.index(j)
                )
        mbarrier.expect(dout_full.index(i), dout_descriptor.block_type.nbytes)
        tma.async_copy_global_to_shared(dout_descriptor, [batch, head, row, 0], dout_full.index(i), dout_smem.index(i))


@gluon.jit
def _add_dq(dq, pointer):
    """Add a tile of dq to the buffer, where the four numbers of a thread's two rows lie together."""
    x = dq.reshape([4, 2, 8, COLUMNS // 8, 4, 2]).permute(0, 3, 2, 4, 1, 5).reshape([QUERIES * COLUMNS])
    gl.atomic_add(pointer + gl.arange(0, x.shape[0], x.type.layout), x, sem="relaxed")


@gluon.jit
def _scores(PART: gl.constexpr, PLACE: gl.constexpr, zero, phase, more, smem, bars):
    """Start the scores [keys, queries] of the tile of queries in place PLACE; without `more` they mean nothing."""
    mbarrier.wait(bars[1].index(PLACE), phase, pred=more)
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, QUERIES, 16])
    q = matrix(smem[2].index(PLACE + zero)).permute((1, 0))
    scores = gl.zeros([ROWS, QUERIES], gl.float32, layout)
    BLOCK: gl.constexpr = PART if smem[0].shape[0] == 2 else 0
    return mma(matrix(smem[0].index(BLOCK + zero)), q, scores, use_acc=False, is_async=True)


@gluon.jit
def _step(
    PART: gl.constexpr, PLACE: gl.constexpr, zero, s, dk, dv, phase, more, dq_ptr, smem, bars, scale, distance,
    CAUSAL: gl.constexpr, WINDOW: gl.constexpr,
):
    """Add what the tile of queries in place PLACE, whose scores are s, contributes, and compute the next tile's scores.

    distance: of the tile's first query from the program's first key. zero is 0, but the compiler does not know it. With
    a known 0 it would compute all descriptors of shared memory before the loop, and there are no registers for them.
    """
    k_smem, v_smem, q_smem, dout_smem, stats_smem, ds0, ds1, numbers = smem
    kv_full, q_full, dout_full, empty, ds_full0, ds_full1 = bars
    HEAD_DIM: gl.constexpr = k_smem.shape[4]
    OWN_KEYS: gl.constexpr = HEAD_DIM < 256
    WIDTH: gl.constexpr = HEAD_DIM if OWN_KEYS else HEAD_DIM // 2  # of dk and dv
    BLOCK: gl.constexpr = PART if OWN_KEYS else 0  # of k and v
    # With head_dim 128 each consumer computes half of dq's columns; with 64, all of them for every other tile.
    WITH_DQ: gl.constexpr = HEAD_DIM == 128 or PART == PLACE
    COLUMN: gl.constexpr = PART * COLUMNS if HEAD_DIM == 128 else 0
    dtype: gl.constexpr = k_smem.dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, QUERIES, 16])
    a_layout: gl.constexpr = gl.DotOperandLayout(0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16]), 2)
    dq_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    columns: gl.constexpr = gl.SliceLayout(0, s_layout)
    stats = stats_smem._reinterpret(gl.float32, [4, QUERIES], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    ds_smem = ds1 if PLACE else ds0
    q = matrix(q_smem.index(PLACE + zero))
    dout = matrix(dout_smem.index(PLACE + zero))
    mbarrier.wait(dout_full.index(PLACE), phase)
    dp = gl.zeros([ROWS, QUERIES], gl.float32, s_layout)
    dp = mma(matrix(v_smem.index(BLOCK + zero)), dout.permute((1, 0)), dp, use_acc=False, is_async=True)
    p = _exp2(s * scale - stats.index(2 * PLACE).load(columns)[None, :])
    if CAUSAL:
        masked = distance < k_smem.shape[0] * ROWS
        if WINDOW:
            masked = masked | (distance + QUERIES - BLOCK * ROWS > WINDOW)
        if masked:
            # The queries' numbers come from memory. Computed, they would stay in registers during the loop.
            key = gl.arange(0, ROWS, gl.SliceLayout(1, s_layout))[:, None] + BLOCK * ROWS
            query = numbers.load(columns)[None, :] + distance
            visible = key <= query
            if WINDOW:
                visible = visible & (query < key + WINDOW)
            p = gl.where(visible, p, 0.0)
    p = _pack(p, dtype)
    own_q = q
    own_dout = dout
    if not OWN_KEYS:
        own_q = q.slice(PART * WIDTH, WIDTH, 1)
        own_dout = dout.slice(PART * WIDTH, WIDTH, 1)
    dv = mma(gl.convert_layout(p, a_layout, assert_trivial=True), own_dout, dv, is_async=True)
    dp = mma_wait(1, deps=[dp])
    ds = _pack(_unpack(p) * (dp - stats.index(2 * PLACE + 1).load(columns)[None, :]), dtype)
    ds_smem.index(PART).store(ds)
    fence_async_shared()
    thread_barrier()
    if OWN_KEYS:
        mbarrier.arrive((ds_full1 if PART else ds_full0).index(PLACE), count=1)
    dv = mma_wait(0, deps=[dv])
    dq = gl.zeros([QUERIES, COLUMNS], gl.float32, dq_layout)
    if not OWN_KEYS:
        k = matrix(k_smem.index(zero)).slice(PART * WIDTH, COLUMNS, 1)
        dq = mma(ds_smem.index(PART + zero).permute((1, 0)), k, dq, use_acc=False, is_async=True)
        dk = mma(gl.convert_layout(ds, a_layout, assert_trivial=True), own_q, dk, is_async=True)
        dq = mma_wait(1, deps=[dq])
        _add_dq(dq, dq_ptr + (PLACE * HEAD_DIM + PART * WIDTH) * QUERIES)
        k = matrix(k_smem.index(zero)).slice(PART * WIDTH + COLUMNS, COLUMNS, 1)
        dq = mma(ds_smem.index(PART + zero).permute((1, 0)), k, dq, use_acc=False, is_async=True)
    elif WITH_DQ:
        k = matrix(k_smem.index(PART + zero)).slice(COLUMN, COLUMNS, 1)
        dq = mma(ds_smem.index(PART + zero).permute((1, 0)), k, dq, use_acc=False, is_async=True)
        mbarrier.wait((ds_full0 if PART else ds_full1).index(PLACE), phase)  # the other consumer's ds
        k = matrix(k_smem.index(1 - PART + zero)).slice(COLUMN, COLUMNS, 1)
        dq = mma(ds_smem.index(1 - PART + zero).permute((1, 0)), k, dq, is_async=True)
        dk = mma(gl.convert_layout(ds, a_layout, assert_trivial=True), own_q, dk, is_async=True)
        dq = mma_wait(1, deps=[dq])
        _add_dq(dq, dq_ptr + (PLACE * HEAD_DIM + COLUMN) * QUERIES)
    else:
        dk = mma(gl.convert_layout(ds, a_layout, assert_trivial=True), own_q, dk, is_async=True)
    s = _scores(PART, 1 - PLACE, zero, phase ^ PLACE, more, smem, bars)
    if OWN_KEYS:
        dk = mma_wait(1, deps=[dk])
    else:
        dk, dq = mma_wait(1, deps=[dk, dq])
        _add_dq(dq, dq_ptr + (PLACE * HEAD_DIM + PART * WIDTH + COLUMNS) * QUERIES)
    mbarrier.arrive(empty.index(PLACE), count=1)
    s = mma_wait(0, deps=[s])
    return s, dk, dv


@gluon.jit
def _consume(
    PART: gl.constexpr, place, sizes, smem, bars, dq_ptr, dk_ptr, dv_ptr, stride_db, stride_dh, stride_ds, sequence,
    offsets_ptr, sequences, scale_log2e, scale,
    CAUSAL: gl.constexpr, WINDOW: gl.constexpr, PACKED: gl.constexpr, SPLITS: gl.constexpr,
):
    kv_index, n, first_row, first_tile, begin, per_head = place
    kv_heads, sharing, tiles_of_head = sizes
    k_smem, v_smem = smem[0], smem[1]
    kv_full = bars[0]
    HEAD_DIM: gl.constexpr = k_smem.shape[4]
    BLOCKS: gl.constexpr = k_smem.shape[0]
    WIDTH: gl.constexpr = HEAD_DIM * BLOCKS // 2
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    dk = gl.zeros([ROWS, WIDTH], gl.float32, layout)
    dv = gl.zeros([ROWS, WIDTH], gl.float32, layout)
    pairs = per_head // 2  # of tiles of queries of one head
    tile = (kv_index * sharing).to(gl.int64) * tiles_of_head + first_tile + begin
    dq_ptr += tile * (QUERIES * HEAD_DIM)
    mbarrier.wait(kv_full.index(0), 0)
    s = mma_wait(0, deps=[_scores(PART, 0, 0, 0, True, smem, bars)])
    mbarrier.wait(kv_full.index(1), 0)
    phase = 0
    j = 0
    for t in range(pairs * sharing):
        more = t + 1 < pairs * sharing
        distance = (begin + 2 * j) * QUERIES - n * (BLOCKS * ROWS)
        s, dk, dv = _step(
            PART, 0, t >> 30, s, dk, dv, phase, True, dq_ptr, smem, bars, scale_log2e, distance, CAUSAL, WINDOW
        )
        s, dk, dv = _step(
            PART, 1, t + 1 >> 30, s, dk, dv, phase, more, dq_ptr, smem, bars, scale_log2e, distance + QUERIES,
            CAUSAL, WINDOW,
        )
        phase ^= 1
        dq_ptr += 2 * QUERIES * HEAD_DIM
        j += 1
        if j == pairs:
            j = 0
            dq_ptr += (tiles_of_head - per_head) * (QUERIES * HEAD_DIM)
    batch = kv_index // kv_heads
    kv_head = kv_index % kv_heads
    if PACKED:  # read again, because they would take registers during the loop
        first_row, length, slot, _ = packed_place(
            gl.program_id(0) // (2 // BLOCKS) % (tiles_of_head // 2), offsets_ptr, sequences, SLOT, 4, PACKED
        )
    else:
        length = sequence
    row = n * (BLOCKS * ROWS) + (PART * ROWS if BLOCKS == 2 else 0)
    offset = batch.to(gl.int64) * stride_db + kv_head.to(gl.int64) * stride_dh + first_row.to(gl.int64) * stride_ds
    if BLOCKS == 1 or SPLITS > 1:
        # With BLOCKS == 1 each consumer has half of the columns. Threads store their pairs of numbers.
        column: gl.constexpr = PART * WIDTH if BLOCKS == 1 else 0
        dtype: gl.constexpr = dk_ptr.dtype.element_ty
        store_pairs(dv.to(dtype), dv_ptr + offset + column, stride_ds, row, length)
        store_pairs((dk * scale).to(dtype), dk_ptr + offset + column, stride_ds, row, length)
    else:
        mbarrier.arrive(kv_full.index(2), count=1)
        matrix(v_smem.index(PART)).store(dv.to(k_smem.dtype))
        thread_barrier()
        store_rows(v_smem.index(PART), dv_ptr + offset, stride_ds, row, length)
        mbarrier.wait(kv_full.index(2), 0)  # the other consumer has read its last k
        matrix(k_smem.index(PART)).store((dk * scale).to(k_smem.dtype))
        thread_barrier()
        store_rows(k_smem.index(PART), dk_ptr + offset, stride_ds, row, length)


@triton.jit
def _tile_of_queries(sequence, offsets_ptr, sequences, QUERIES: tl.constexpr, PACKED: tl.constexpr):
    """Return the program's number, its head, the first row of its slot, and the sequence's first row and length.

    Two programs share a slot of 2 QUERIES rows, and have QUERIES rows each.
    """
    tile = tl.program_id(0).to(tl.int64)
    head_index, slot, _, first, length = tile_of_program(
        tl.program_id(0) // 2, sequence, offsets_ptr, sequences, 2 * QUERIES, PACKED
    )
    return tile, head_index, slot * 2 * QUERIES, first, length


def _flops_per_number(count: int, name: str) -> Callable[[Shapes], float | None]:
    """Return a function for `count` FLOPs a number of the tensor, or None where the sequences' lengths are data."""
    return lambda shapes: None if shapes["PACKED"] else count * math.prod(shapes[name])


@declare(*DELTA, flops=_flops_per_number(2, "out_ptr"))
@triton.jit
def hopper_attention_before_kernel(
    out_ptr, dout_ptr, logsumexp2_ptr, stats_ptr, dq_sum_ptr, offsets_ptr, stride_ob, stride_oh, stride_os, stride_gb,
    stride_gh, stride_gs, heads, sequence, sequences, HEAD_DIM: tl.constexpr, PACKED: tl.constexpr,
):
    """For QUERIES rows, store logsumexp2 and delta = sum(dout * out) side by side, and zeros for the sum of dq.

    Rows past the end have an infinite logsumexp2.
    """
    QUERIES: tl.constexpr = 64
    tile, head_index, slot_start, first, length = _tile_of_queries(sequence, offsets_ptr, sequences, QUERIES, PACKED)
    if PACKED:
        if slot_start >= length:
            return
    start = slot_start + tile % 2 * QUERIES
    batch = head_index // heads
    head = head_index % heads
    out_ptr = rows_of_head(out_ptr, (stride_ob, stride_oh, stride_os), batch, head, first, PACKED)
    dout_ptr = rows_of_head(dout_ptr, (stride_gb, stride_gh, stride_gs), batch, head, first, PACKED)
    out = load_rows((out_ptr, stride_os, 1), start, length, QUERIES, HEAD_DIM, False, True)
    dout = load_rows((dout_ptr, stride_gs, 1), start, length, QUERIES, HEAD_DIM, False, True)
    row = start + tl.arange(0, QUERIES)
    logsumexp2_ptr += head_index * sequence + first
    logsumexp2 = tl.load(logsumexp2_ptr + row, mask=row < length, other=float("inf"))
    stats = stats_ptr + tile * (2 * QUERIES) + tl.arange(0, QUERIES)
    tl.store(stats, logsumexp2)
    tl.store(stats + QUERIES, tl.sum(out.to(tl.float32) * dout.to(tl.float32), axis=1))
    number = tl.arange(0, QUERIES * HEAD_DIM)
    zeros = tl.zeros([QUERIES * HEAD_DIM], tl.float32)
    tl.store(dq_sum_ptr + tile * (QUERIES * HEAD_DIM) + number, zeros)


@declare(SCALED, flops=_flops_per_number(1, "dq_ptr"))
@triton.jit
def hopper_attention_after_kernel(
    dq_sum_ptr, dq_ptr, offsets_ptr, stride_qb, stride_qh, stride_qs, heads, sequence, sequences, scale,
    HEAD_DIM: tl.constexpr, PACKED: tl.constexpr,
):
    """Store QUERIES rows of dq from the sum, whose numbers are in the order of `_add_dq`."""
    QUERIES: tl.constexpr = 64
    tile, head_index, slot_start, first, length = _tile_of_queries(sequence, offsets_ptr, sequences, QUERIES, PACKED)
    if PACKED:
        if slot_start >= length:
            return
    start = slot_start + tile % 2 * QUERIES
    dq_ptr = rows_of_head(
        dq_ptr, (stride_qb, stride_qh, stride_qs), head_index // heads, head_index % heads, first, PACKED
    )
    number = tl.arange(0, QUERIES * HEAD_DIM)
    dq = tl.load(dq_sum_ptr + tile * (QUERIES * HEAD_DIM) + number) * scale
    dq = dq.to(dq_ptr.dtype.element_ty).reshape([HEAD_DIM // 64, 4, 8, 8, 4, 2, 2])
    dq = dq.permute(1, 5, 3, 0, 2, 4, 6).reshape([QUERIES, HEAD_DIM])
    row = start + tl.arange(0, QUERIES)
    offset = row.to(tl.int64)[:, None] * stride_qs + tl.arange(0, HEAD_DIM)[None, :]
    tl.store(dq_ptr + offset, dq, mask=(row < length)[:, None])


@declare(*BACKWARD, flops=products_flops(5))
@gluon.jit(do_not_specialize=["sequence", "all_kv_heads", "kv_heads", "sharing", "group", "kv_tiles", "sequences"])
def hopper_attention_backward_kernel(
    q_descriptor, k_descriptor, v_descriptor, dout_descriptor, stats_descriptor, dq_sum_ptr, dk_ptr, dv_ptr,
    offsets_ptr, stride_db, stride_dh, stride_ds, sequence, all_kv_heads, kv_heads, sharing, group, kv_tiles,
    sequences, scale_log2e, scale, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, PACKED: gl.constexpr,
    SPLITS: gl.constexpr,
):
    """Compute dk and dv of some rows of a head of k and v, and add their part of dq to the buffer at dq_sum_ptr.

    stats_descriptor, dq_sum_ptr: as `hopper_attention_before_kernel` writes them. group: heads that programs work on
    together. kv_tiles: of one head. Each of the SPLITS of a head of k and v counts as a head of dk and dv, which
    `sharing` heads of q share.
    """
    BLOCKS: gl.constexpr = 2 if k_descriptor.block_type.shape[3] < 256 else 1
    KEYS: gl.constexpr = BLOCKS * ROWS
    programs = kv_tiles * (2 // BLOCKS)  # of one head
    if PACKED:
        kv_index = gl.program_id(0) // programs
        rest = gl.program_id(0) % programs
        first_row, length, slot, base = packed_place(rest // (2 // BLOCKS), offsets_ptr, sequences, SLOT, 4, PACKED)
        n = slot * (2 // BLOCKS) + rest % (2 // BLOCKS)
        if n * KEYS >= length:
            return
        first_tile = 2 * base
    else:
        # A few heads, whose queries fit in L2, come together, and within them the first keys, visible to the most
        # queries, first.
        begin_head = gl.program_id(0) // (group * programs) * group
        rest = gl.program_id(0) - begin_head * programs
        together = gl.minimum(group, all_kv_heads - begin_head)
        kv_index = begin_head + rest % together
        n = rest // together
        first_row = 0
        first_tile = 0
        length = sequence
    # Tiles of queries come in pairs.
    begin = n * KEYS // SLOT * 2 if CAUSAL else 0
    end = 2 * gl.cdiv(length, SLOT)
    if WINDOW:
        end = gl.minimum(end, begin + 2 * gl.cdiv((n + 1) * KEYS - 1 + WINDOW - begin * QUERIES, SLOT))
    place = (kv_index, n, first_row, first_tile, begin, end - begin)
    sizes = (kv_heads, sharing, 2 * kv_tiles)
    numbers = gl.allocate_shared_memory(gl.int32, [QUERIES], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    numbers.store(gl.arange(0, QUERIES, gl.BlockedLayout([1], [32], [4], [0])))
    ds_layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    ds0 = gl.allocate_shared_memory(k_descriptor.dtype, [2, ROWS, QUERIES], ds_layout)
    ds1 = gl.allocate_shared_memory(k_descriptor.dtype, [2, ROWS, QUERIES], ds_layout)
    smem = (
        buffers(k_descriptor, BLOCKS), buffers(v_descriptor, BLOCKS), buffers(q_descriptor, 2),
        buffers(dout_descriptor, 2),
        buffers(stats_descriptor, 2), ds0, ds1, numbers,
    )
    kv_full = gl.allocate_shared_memory(gl.int64, [3, 1], mbarrier.MBarrierLayout())  # of k, of v, and of the end
    mbarrier.init(kv_full.index(0), count=1)
    mbarrier.init(kv_full.index(1), count=1)
    mbarrier.init(kv_full.index(2), count=2)
    # Barriers for q with its numbers, for dout, for both being read, and for each consumer's ds.
    bars = (kv_full, barriers(2, 1), barriers(2, 1), barriers(2, 2), barriers(2, 1), barriers(2, 1))
    fence_async_shared()
    gl.warp_specialize(
        [
            (_consume, (
                0, place, sizes, smem, bars, dq_sum_ptr, dk_ptr, dv_ptr, stride_db, stride_dh, stride_ds, sequence,
                offsets_ptr, sequences, scale_log2e, scale, CAUSAL, WINDOW, PACKED, SPLITS,
            )),
            (_consume, (
                1, place, sizes, smem, bars, dq_sum_ptr, dk_ptr, dv_ptr, stride_db, stride_dh, stride_ds, sequence,
                offsets_ptr, sequences, scale_log2e, scale, CAUSAL, WINDOW, PACKED, SPLITS,
            )),
            (_produce, (
                place, sizes, smem, bars, q_descriptor, k_descriptor, v_descriptor, dout_descriptor, stats_descriptor,
                SPLITS,
            )),
        ],
        [4, 1],
        [240, 24],  # warps and registers of the second consumer and the producer
    )


def launch_backward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, dout: torch.Tensor,
    logsumexp2: torch.Tensor, causal: bool, window: int, offsets: torch.Tensor | None,
    gradients: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None, splits: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return dq, dk and dv, made by `empty_output`.

    q, k, v, dout fit descriptors; the last stride of out is 1. offsets: of packed sequences, which have no splits.
    gradients: memory for the results, with last stride 1; dk and dv have the same strides. splits: as in
    `choose_splits`.
    """
    batch, heads, sequence, head_dim = q.shape
    keys = KEYS[head_dim]
    splits = choose_splits(q, k, keys, causal, window, offsets, splits)
    kv_heads = k.shape[1] * splits
    dq, dk, dv = gradients or tuple(empty_output(x, offsets) for x in (q, k, v))
    sums = empty_sums(k, splits) if splits > 1 else None
    written_dk, written_dv = sums or (dk, dv)
    sequences, packed = packed_sizes(offsets)
    kv_tiles = sequence // SLOT.value + sequences if packed else cdiv(sequence, SLOT.value)
    tiles = 2 * batch * heads * kv_tiles
    stats = torch.empty((tiles, 2, QUERIES.value), dtype=torch.float32, device=q.device)
    dq_sum = torch.empty((tiles, QUERIES.value, head_dim), dtype=torch.float32, device=q.device)
    # The q and dout of a group of heads, and their dq in float32, fit in L2. But a group has a program for each
    # multiprocessor, because the long ones of a smaller last group would start too late.
    in_l2 = L2_BYTES // (4 * q.element_size() * sequence * head_dim * (heads // kv_heads))
    together = max(1, in_l2, multiprocessors(q.device) // kv_tiles)
    scale = head_dim**-0.5
    with device_of(q):
        hopper_attention_before_kernel[(tiles,)](
            out, dout, logsumexp2, stats, dq_sum, offsets, *out.stride()[:3], *dout.stride()[:3], heads, sequence,
            sequences, HEAD_DIM=head_dim, PACKED=packed, num_warps=4,
        )
        with computing(*BACKWARD_BY_CASE[causal, False], **(SUMS if sums else {})):
            hopper_attention_backward_kernel[(batch * kv_heads * kv_tiles * (SLOT.value // keys),)](
                *(rows_descriptor(x, ROWS.value) for x in (q, k, v, dout)),
                descriptor(stats, [1, 2, QUERIES.value], STATS_LAYOUT), dq_sum,
                written_dk, written_dv, offsets, *written_dk.stride()[:3], sequence,
                batch * kv_heads, kv_heads, heads // kv_heads, together, kv_tiles, sequences, scale * LOG2_E.value,
                scale, CAUSAL=causal, WINDOW=window, PACKED=packed, SPLITS=splits, num_warps=4,
            )
        if sums:
            launch_sum_splits(sums, dk, dv)
        hopper_attention_after_kernel[(tiles,)](
            dq_sum, dq, offsets, *dq.stride()[:3], heads, sequence, sequences, scale, HEAD_DIM=head_dim, PACKED=packed,
            num_warps=4,
        )
    return dq, dk, dv
