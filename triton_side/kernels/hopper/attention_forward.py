"""Attention for Hopper GPUs: out = softmax(masked(q k^T / sqrt(head_dim))) v, and the logsumexp of each row.

The formula, shapes and tiling are those of `kernels/attention.py`; "FlashAttention-3" (Shah et al., arXiv 2407.08608)
describes the division of work. One program runs on each multiprocessor:

- A producer warp loads tiles of q, k and v by TMA into rings of buffers in shared memory.
- Two or four consumers of four warps own 64 rows of queries each. A consumer starts the product of the next tile's
  scores and the product of this tile's weights with v together. The tensor cores work while it computes its softmax.
- With head_dim 64, exponentials take as long as products. Two consumers with a causal mask, and four without a mask,
  start their products in turns.
- Programs take tiles of 128 or 256 queries from a counter in memory, tiles with many visible keys first. The first
  scores of the next tile of queries start before the last product of this one has ended.

Tiles of keys are visited from the latest to the first. A row's own key is then in its first tile, so its maximum is
finite from the start, and only the first tile needs the causal mask.

Shapes: q, out [batch, heads, sequence, head_dim]; k, v [batch, kv_heads, sequence, head_dim]; logsumexp2 [batch, heads,
sequence], float32. dtypes: bfloat16, float16. head_dim: 64, 128, 256.
"""

from typing import NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma as mma
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma_wait as mma_wait

from xlafuse.triton_side.calls.declare import computing, declare
from xlafuse.triton_side.kernels.hopper.parts import (
    L2_BYTES,
    barriers,
    buffers,
    halves,
    joined,
    matrix,
    packed_place,
    per_row,
    rows_descriptor,
    store_pairs,
    store_rows,
    thread_barrier,
)
from xlafuse.triton_side.kernels.shared.attention_operations import FORWARD, FORWARD_BY_CASE, products_flops
from xlafuse.triton_side.kernels.shared.attention_tiles import empty_output, packed_sizes
from xlafuse.triton_side.kernels.shared.constants import LOG2_E
from xlafuse.triton_side.kernels.shared.counters import zero_counters
from xlafuse.triton_side.kernels.shared.launch import cdiv, device_of, multiprocessors

ROWS = gl.constexpr(64)  # queries of one consumer


class Tiling(NamedTuple):
    """How a program divides its work. Its tile has ROWS queries for each consumer."""

    consumers: int
    keys: int  # of a tile
    q_stages: int  # buffers for the queries of each consumer
    k_stages: int  # buffers for tiles of k
    v_stages: int


# By head_dim.
TILES = {64: Tiling(2, 128, 1, 4, 4), 128: Tiling(2, 128, 1, 2, 3), 256: Tiling(2, 64, 1, 2, 3)}
# Without a mask. A thread of four consumers has 112 registers. With head_dim 128, output, scores and weights alone fill
# them.
FULL_TILES = {64: Tiling(4, 64, 2, 6, 6)}
# The time of such a tile in times of one of TILES, which has half the queries: 1.78 to 1.81 on an H200.
FULL_TIME = 1.8


@gluon.jit
def _tile(
    t, sizes, first, length, slot,
    QUERIES: gl.constexpr, KEYS: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, PACKED: gl.constexpr,
):
    """Return the place of tile t: head, tile of queries, first row, length, and its latest and earliest tile of keys.

    A few heads, whose keys and values fit in L2, come together, and within them the tiles with the most keys first.
    sizes: heads of all batches, heads at a time, tiles of a head, and the sequence. first, length, slot: of a packed
    sequence.
    """
    heads, group, tiles, sequence, _ = sizes
    if PACKED:
        head = t // tiles
        q_tile = gl.cdiv(length, QUERIES) - 1 - slot
    else:
        begin = t // (group * tiles) * group
        rest = t - begin * tiles
        together = gl.minimum(group, heads - begin)
        head = begin + rest % together
        q_tile = tiles - 1 - rest // together
        first = 0
        length = sequence
    latest = (q_tile + 1) * (QUERIES // KEYS) - 1 if CAUSAL else gl.cdiv(length, KEYS) - 1
    earliest = gl.maximum(q_tile * QUERIES - WINDOW + 1, 0) // KEYS if WINDOW else 0
    return head, q_tile, first, length, latest, earliest


@gluon.jit
def _load(descriptor, full, empty, ring, g, batch, head, row):
    """Load tile number g of k or v into its place in the ring, once all consumers have left that place."""
    i = g % ring.shape[0]
    mbarrier.wait(empty.index(i), (g // ring.shape[0] & 1) ^ 1)
    mbarrier.expect(full.index(i), descriptor.block_type.nbytes)
    tma.async_copy_global_to_shared(descriptor, [batch, head, row, 0], full.index(i), ring.index(i))


@gluon.jit
def _number(places, i):
    return gl.max(places.index(i).load(gl.BlockedLayout([1], [32], [gl.num_warps()], [0])), 0)


@gluon.jit
def _next_tile(t, counter, total, sizes, offsets_ptr, sequences, QUERIES: gl.constexpr, PACKED: gl.constexpr):
    """Return a tile's number from the counter, and the place of a packed one; slots without rows are skipped."""
    first = 0
    length = 0
    slot = 0
    if PACKED:
        tiles = sizes[2]
        searching = t < total
        while searching:
            first, length, slot, base = packed_place(t % tiles, offsets_ptr, sequences, QUERIES, 1, PACKED)
            searching = slot * QUERIES >= length
            if searching:
                t = gl.num_programs(0) + gl.atomic_add(counter, 1)
                searching = t < total
    return t, first, length, slot


@gluon.jit
def _announce(
    t, first, length, slot, n, more, sizes, q_descriptor, smem, bars, heads,
    QUERIES: gl.constexpr, KEYS: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, PACKED: gl.constexpr,
):
    """Tell the consumers that their n-th tile is t, and load its queries."""
    head, q_tile, first, length, latest, earliest = _tile(
        t, sizes, first, length, slot, QUERIES, KEYS, CAUSAL, WINDOW, PACKED
    )
    CONSUMERS: gl.constexpr = QUERIES // ROWS
    Q_STAGES: gl.constexpr = smem[0].shape[0] // CONSUMERS
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    for part in gl.static_range(CONSUMERS):
        i = n % Q_STAGES * CONSUMERS + part
        full = bars[0].index(i)
        mbarrier.wait(bars[1].index(i), (n // Q_STAGES & 1) ^ 1)
        smem[4].index(4 * i).store(gl.full([1], t, gl.int32, layout))
        if PACKED:
            smem[4].index(4 * i + 1).store(gl.full([1], first, gl.int32, layout))
            smem[4].index(4 * i + 2).store(gl.full([1], length, gl.int32, layout))
            smem[4].index(4 * i + 3).store(gl.full([1], slot, gl.int32, layout))
        thread_barrier()  # all threads of the warp store the numbers, and the first one tells the consumers
        mbarrier.expect(full, q_descriptor.block_type.nbytes, pred=more)
        row = first + (q_tile * CONSUMERS + part) * ROWS
        tma.async_copy_global_to_shared(
            q_descriptor, [head // heads, head % heads, row, 0], full, smem[0].index(i), pred=more
        )
        mbarrier.arrive(full, count=1, pred=not more)
    return head, first, latest, earliest


@gluon.jit
def _produce(loads, QUERIES: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, PACKED: gl.constexpr):
    (
        total, sizes, smem, bars, q_descriptor, k_descriptor, v_descriptor, counter, offsets_ptr, sequences, heads,
        sharing,
    ) = loads
    KEYS: gl.constexpr = smem[1].shape[3]
    # Queries of head_dim 256 stay in their only buffer until the last scores, which need the v before the last.
    LATE: gl.constexpr = 1 if smem[0].shape[4] == 256 else 0
    programs = gl.num_programs(0)
    t, first, length, slot = _next_tile(
        gl.program_id(0), counter, total, sizes, offsets_ptr, sequences, QUERIES, PACKED
    )
    head, first, latest, earliest = _announce(
        t, first, length, slot, 0, t < total, sizes, q_descriptor, smem, bars, heads,
        QUERIES, KEYS, CAUSAL, WINDOW, PACKED,
    )
    g = 0  # number of the next tile of keys
    n = 0  # number of the tile of queries
    while t < total:
        batch = head // heads
        kv_head = head % heads // sharing
        kv_first = first + latest * KEYS
        steps = latest - earliest
        for j in range(steps + 2):
            if j <= steps:
                _load(k_descriptor, bars[2], bars[3], smem[1], g + j, batch, kv_head, kv_first - j * KEYS)
            if j > 0:
                _load(v_descriptor, bars[4], bars[5], smem[2], g + j - 1, batch, kv_head, kv_first - (j - 1) * KEYS)
            if j == steps + LATE:  # early enough for the next queries to arrive in time
                n += 1
                t = programs + gl.atomic_add(counter, 1)
                t, first, length, slot = _next_tile(t, counter, total, sizes, offsets_ptr, sequences, QUERIES, PACKED)
                head, first, latest, earliest = _announce(
                    t, first, length, slot, n, t < total, sizes, q_descriptor, smem, bars, heads,
                    QUERIES, KEYS, CAUSAL, WINDOW, PACKED,
                )
        g += steps + 1
    if gl.atomic_add(counter + 1, 1) == programs - 1:  # the last program prepares the counters for the next launch
        gl.store(counter, 0)
        gl.store(counter + 1, 0)


@gluon.jit
def _row_max(x, layout: gl.constexpr):
    for _ in gl.static_range(2):  # as a tree, because gl.max is one chain of dependent instructions
        x = gl.maximum(*halves(x))
    return gl.convert_layout(gl.max(x, 1), layout, assert_trivial=True)


@gluon.jit
def _row_sums(x):
    """Return four sums a row, each of one thread's columns. They are added at the end of a tile of queries."""
    return gl.sum(gl.sum(x.reshape([x.shape[0], x.shape[1] // 8, 4, 2]), 1), 2)


@gluon.jit
def _outside_window(x, distance, WINDOW: gl.constexpr):
    """Return x with -inf where the key lies WINDOW or more before the query. distance: of row 0 from column 0."""
    row = gl.arange(0, x.shape[0], gl.SliceLayout(1, x.type.layout))[:, None]
    column = gl.arange(0, x.shape[1], gl.SliceLayout(0, x.type.layout))[None, :]
    return gl.where(column > row + (distance - WINDOW), x, float("-inf"))


@gluon.jit
def _first_weights(
    scores, scale, keys, PART: gl.constexpr, KEYS: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr,
    rows: gl.constexpr, p_layout: gl.constexpr, dtype: gl.constexpr,
):
    """Return maximum, sums and weights of a row tile's first scores, the only ones with a causal or an end mask.

    Narrow scores lack the right half of the tile, which is invisible. keys: how many keys of the tile exist.
    """
    NARROW: gl.constexpr = scores.shape[1] < KEYS
    HALF: gl.constexpr = KEYS // 2
    DISTANCE: gl.constexpr = PART * ROWS if KEYS > ROWS else 0  # of the first row from the first key
    if NARROW:
        a = scores
        b = scores
    else:
        a, b = halves(scores)
    row = gl.arange(0, ROWS, gl.SliceLayout(1, a.type.layout))[:, None]
    column = gl.arange(0, HALF, gl.SliceLayout(0, a.type.layout))[None, :]
    if CAUSAL:
        if DISTANCE < HALF:
            a = gl.where(column <= row + DISTANCE, a, float("-inf"))
        if not NARROW:
            b = gl.where(column + HALF <= row + DISTANCE, b, float("-inf"))
    else:
        a = gl.where(column < keys, a, float("-inf"))
        b = gl.where(column < keys - HALF, b, float("-inf"))
    if WINDOW and WINDOW < KEYS:
        a = _outside_window(a, DISTANCE, WINDOW)
        if not NARROW:
            b = _outside_window(b, DISTANCE - HALF, WINDOW)
    m = _row_max(a if NARROW else gl.maximum(a, b), rows) * scale
    a = gl.exp2(a * scale - per_row(m, a))
    b = gl.zeros_like(a) if NARROW else gl.exp2(b * scale - per_row(m, b))
    return m, _row_sums(a if NARROW else a + b), joined(a, b, p_layout, dtype)


@gluon.jit
def _queries(i, phase, smem, bars, layout: gl.constexpr, IN_REGISTERS: gl.constexpr, PACKED: gl.constexpr):
    """Return the number of the tile in buffer i, the place of a packed one, and the consumer's queries."""
    mbarrier.wait(bars[0].index(i), phase)
    t = _number(smem[4], 4 * i)
    first = 0
    length = 0
    slot = 0
    if PACKED:
        first = _number(smem[4], 4 * i + 1)
        length = _number(smem[4], 4 * i + 2)
        slot = _number(smem[4], 4 * i + 3)
    q = matrix(smem[0].index(i))
    if IN_REGISTERS:
        q = q.load(layout)
        mbarrier.arrive(bars[1].index(i), count=1)
    return t, first, length, slot, q


@gluon.jit
def _pass(full, empty, ring, g, more):
    """Leave tile number g of a ring unused: all its keys are invisible."""
    i = g % ring.shape[0]
    mbarrier.wait(full.index(i), g // ring.shape[0] & 1, pred=more)
    mbarrier.arrive(empty.index(i), count=1, pred=more)


@gluon.jit
def _scores(q, g, more, smem, bars, WIDTH: gl.constexpr):
    """Start the product of q with the first WIDTH keys of tile g."""
    ring = smem[1]
    i = g % ring.shape[0]
    mbarrier.wait(bars[2].index(i), g // ring.shape[0] & 1, pred=more)
    k = matrix(ring.index(i)).slice(0, WIDTH)
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    return mma(q, k.permute((1, 0)), gl.zeros([ROWS, WIDTH], gl.float32, layout), use_acc=False, is_async=True)


@gluon.jit
def _at_barrier(x, instruction: gl.constexpr):
    """Execute a barrier instruction of PTX when x is known, and return x."""
    asm: gl.constexpr = instruction + " mov.b32 $0, $2; mov.b32 $1, $3;"
    return gl.inline_asm_elementwise(asm, "=f,=f,f,f", [x], dtype=gl.float32, is_pure=False, pack=2)


@gluon.constexpr_function
def _turn(instruction, consumer):
    """Return a barrier instruction of PTX. A consumer's 128 threads wait there for the 128 of the one before it."""
    return f"{instruction} {8 + consumer}, 256;"


@gluon.jit
def _products(
    q, p, o, m, g, next_g, more, smem, bars, WIDTH: gl.constexpr, TURN: gl.constexpr, NEXT_TURN: gl.constexpr
):
    """Return the scores of tile next_g, o with tile g's product, which still runs, m as it was, and the place of v.

    TURN, NEXT_TURN: this consumer and the next if they start their products in turns, else None.
    """
    ring = smem[2]
    if TURN is not None:
        m = _at_barrier(m, _turn("bar.sync", TURN))
    s = _scores(q, next_g, more, smem, bars, WIDTH)
    i = g % ring.shape[0]
    mbarrier.wait(bars[4].index(i), g // ring.shape[0] & 1)
    o = mma(p, matrix(ring.index(i)), o, is_async=True)
    if TURN is not None:
        m = _at_barrier(m, _turn("bar.arrive", NEXT_TURN))
    s = mma_wait(1, deps=[s])
    mbarrier.arrive(bars[3].index(next_g % smem[1].shape[0]), count=1, pred=more)
    return s, o, m, i


@gluon.jit
def _consume(
    PART: gl.constexpr, work, QUERIES: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, PACKED: gl.constexpr
):
    total, sizes, smem, bars, out_descriptor, out_ptr, logsumexp2_ptr, stride_oh, stride_os, heads, scale = work
    HEAD_DIM: gl.constexpr = smem[0].shape[4]
    KEYS: gl.constexpr = smem[1].shape[3]
    CONSUMERS: gl.constexpr = QUERIES // ROWS
    # The first consumer sees the left half of its latest tile of keys, or nothing.
    FIRST: gl.constexpr = ROWS if CAUSAL and PART == 0 else KEYS
    SKIPPED: gl.constexpr = 1 if CAUSAL and PART == 0 and KEYS == ROWS else 0
    # Queries in registers save energy, and their buffer is free at once. Head_dim 256 and four consumers leave no
    # registers for them. The next ones of four consumers arrive in a second buffer.
    Q_STAGES: gl.constexpr = smem[0].shape[0] // CONSUMERS
    Q_IN_REGISTERS: gl.constexpr = HEAD_DIM < 256 and Q_STAGES == 1
    # In turns, one consumer's exponentials run beside another's products. On an H200 this makes two consumers 8 to 10%
    # faster with a causal mask, and from 3% slower to 1% faster without one. It makes four consumers 6 to 13% faster.
    IN_TURNS: gl.constexpr = HEAD_DIM == 64 and (CAUSAL or CONSUMERS == 4)
    TURN: gl.constexpr = PART if IN_TURNS else None
    NEXT_TURN: gl.constexpr = (PART + 1) % CONSUMERS
    dtype: gl.constexpr = smem[0].dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    q_layout: gl.constexpr = gl.DotOperandLayout(0, s_layout, 2)
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    sequence = sizes[3]
    t, first, length, slot, q = _queries(PART, 0, smem, bars, q_layout, Q_IN_REGISTERS, PACKED)
    head, q_tile, first, length, latest, earliest = _tile(
        t, sizes, first, length, slot, QUERIES, KEYS, CAUSAL, WINDOW, PACKED
    )
    more = t < total
    if SKIPPED:
        _pass(bars[2], bars[3], smem[1], 0, more)
        _pass(bars[4], bars[5], smem[2], 0, more)
    s0 = mma_wait(0, deps=[_scores(q, SKIPPED, more, smem, bars, FIRST)])
    mbarrier.arrive(bars[3].index(SKIPPED), count=1)
    m, sums, p = _first_weights(
        s0, scale, length - latest * KEYS, PART, KEYS, CAUSAL, WINDOW, rows, p_layout, dtype
    )
    g = 0 + SKIPPED  # number of the tile of keys that p is of
    n = 0  # number of the tile of queries
    if IN_TURNS and NEXT_TURN == 0:  # the last consumer gives the first its first turn
        m = _at_barrier(m, _turn("bar.arrive", 0))
    while t < total:
        o = gl.zeros([ROWS, HEAD_DIM], gl.float32, o_layout)
        steps = latest - SKIPPED - earliest
        for j in range(steps):
            s, o, m, i = _products(q, p, o, m, g, g + 1, True, smem, bars, KEYS, TURN, NEXT_TURN)
            if not Q_IN_REGISTERS and Q_STAGES == 1:  # after the last scores
                mbarrier.arrive(bars[1].index(PART), count=1, pred=j == steps - 1)
            a, b = halves(s)
            if WINDOW:
                distance = q_tile * QUERIES + PART * ROWS - (latest - SKIPPED - 1 - j) * KEYS
                if distance + ROWS > WINDOW:
                    a = _outside_window(a, distance, WINDOW)
                    b = _outside_window(b, distance - KEYS // 2, WINDOW)
            m_new = gl.maximum(m, _row_max(gl.maximum(a, b), rows) * scale)
            alpha = gl.exp2(m - m_new)
            a = gl.exp2(a * scale - per_row(m_new, a))
            # This phase ended long ago. The wait ends a basic block; without it ptxas would wait for o before the
            # exponentials.
            mbarrier.wait(bars[4].index(i), g // smem[2].shape[0] & 1)
            o = mma_wait(0, deps=[o])
            mbarrier.arrive(bars[5].index(i), count=1)
            o = o * per_row(alpha, o)
            b = gl.exp2(b * scale - per_row(m_new, b))
            sums = sums * per_row(alpha, sums) + _row_sums(a + b)
            p = joined(a, b, p_layout, dtype)
            m = m_new
            g += 1
        if not Q_IN_REGISTERS:
            mbarrier.arrive(bars[1].index(n % Q_STAGES * CONSUMERS + PART), count=1, pred=Q_STAGES > 1 or steps == 0)
        n += 1
        t, next_first, next_length, next_slot, q = _queries(
            n % Q_STAGES * CONSUMERS + PART, n // Q_STAGES & 1, smem, bars, q_layout, Q_IN_REGISTERS, PACKED
        )
        next_head, next_q_tile, next_first, next_length, next_latest, next_earliest = _tile(
            t, sizes, next_first, next_length, next_slot, QUERIES, KEYS, CAUSAL, WINDOW, PACKED
        )
        more = t < total
        if SKIPPED:
            _pass(bars[2], bars[3], smem[1], g + 1, more)
        s0, o, m, i = _products(q, p, o, m, g, g + 1 + SKIPPED, more, smem, bars, FIRST, None, None)
        row_sum = gl.convert_layout(gl.sum(sums, 1), rows, assert_trivial=True)
        start = q_tile * QUERIES + PART * ROWS
        row = start + gl.arange(0, ROWS, rows)
        if logsumexp2_ptr is not None:
            pointer = logsumexp2_ptr + head.to(gl.int64) * sequence + first
            gl.store(pointer + row, m + gl.log2(row_sum), mask=row < length)
        m, sums, p = _first_weights(
            s0, scale, next_length - next_latest * KEYS, PART, KEYS, CAUSAL, WINDOW, rows, p_layout, dtype
        )
        o = mma_wait(0, deps=[o])
        mbarrier.arrive(bars[5].index(i), count=1)
        if SKIPPED:
            _pass(bars[4], bars[5], smem[2], g + 1, more)
        o = (o * per_row(1.0 / row_sum, o)).to(dtype)
        if HEAD_DIM == 256:
            offset = (head // heads).to(gl.int64) * sizes[4] + (head % heads).to(gl.int64) * stride_oh
            pointer = out_ptr + offset + first.to(gl.int64) * stride_os
            store_pairs(o, pointer, stride_os, start, length)
        else:
            buffer = smem[3].index(PART)
            if not PACKED:
                tma.store_wait(0)
            thread_barrier()
            matrix(buffer).store(o)
            if PACKED:
                thread_barrier()
                pointer = out_ptr + head.to(gl.int64) * stride_oh + first.to(gl.int64) * stride_os
                store_rows(buffer, pointer, stride_os, start, length)
            else:
                fence_async_shared()
                thread_barrier()
                tma.async_copy_shared_to_global(out_descriptor, [head // heads, head % heads, start, 0], buffer)
        g += 1 + SKIPPED
        head, q_tile, first, length = next_head, next_q_tile, next_first, next_length
        latest, earliest = next_latest, next_earliest
    if HEAD_DIM < 256 and not PACKED:
        tma.store_wait(0)


@declare(*FORWARD, flops=products_flops(2))
@gluon.jit(do_not_specialize=["sequence", "all_heads", "group", "tiles", "heads", "sharing", "sequences"])
def hopper_attention_forward_kernel(
    q_descriptor, k_descriptor, v_descriptor, out_descriptor, out_ptr, logsumexp2_ptr, counter_ptr, offsets_ptr,
    stride_ob, stride_oh, stride_os, sequence, all_heads, group, tiles, heads, sharing, sequences, scale_log2e,
    CONSUMERS: gl.constexpr, Q_STAGES: gl.constexpr, K_STAGES: gl.constexpr, V_STAGES: gl.constexpr,
    CAUSAL: gl.constexpr, WINDOW: gl.constexpr, PACKED: gl.constexpr,
):
    """Compute out, and logsumexp2 if given; `sharing` heads of q share a head of k and v.

    Descriptors are of [batch, heads, sequence, head_dim], with blocks of ROWS rows of q and out, and a tile of k and v.
    Either out_descriptor or out_ptr is given. counter_ptr: two zeros, zero again at the end. group: heads that programs
    work on together. tiles: of one head.
    """
    QUERIES: gl.constexpr = CONSUMERS * ROWS
    Q_BUFFERS: gl.constexpr = CONSUMERS * Q_STAGES
    places = gl.allocate_shared_memory(gl.int32, [4 * Q_BUFFERS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    q_smem = buffers(q_descriptor, Q_BUFFERS)
    out_smem = q_smem
    if q_descriptor.block_type.shape[3] < 256:
        out_smem = buffers(q_descriptor, CONSUMERS)
    smem = (q_smem, buffers(k_descriptor, K_STAGES), buffers(v_descriptor, V_STAGES), out_smem, places)
    # Full and empty barriers: of q and the tile's number, of k, of v.
    bars = (
        barriers(Q_BUFFERS, 1), barriers(Q_BUFFERS, 1), barriers(K_STAGES, 1), barriers(K_STAGES, CONSUMERS),
        barriers(V_STAGES, 1), barriers(V_STAGES, CONSUMERS),
    )
    fence_async_shared()
    total = all_heads * tiles
    sizes = (all_heads, group, tiles, sequence, stride_ob)
    work = (
        total, sizes, smem, bars, out_descriptor, out_ptr, logsumexp2_ptr, stride_oh, stride_os, heads, scale_log2e
    )
    loads = (
        total, sizes, smem, bars, q_descriptor, k_descriptor, v_descriptor, counter_ptr, offsets_ptr, sequences, heads,
        sharing,
    )
    # A constexpr must be written in these lists: from a variable it arrives as a tensor. The numbers are the warps and
    # registers of all consumers but the first, and of the producer.
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_consume, (0, work, QUERIES, CAUSAL, WINDOW, PACKED)),
                (_consume, (1, work, QUERIES, CAUSAL, WINDOW, PACKED)),
                (_produce, (loads, QUERIES, CAUSAL, WINDOW, PACKED)),
            ],
            [4, 1],
            [240, 24],
        )
    else:
        gl.static_assert(CONSUMERS == 4)
        gl.warp_specialize(
            [
                (_consume, (0, work, QUERIES, CAUSAL, WINDOW, PACKED)),
                (_consume, (1, work, QUERIES, CAUSAL, WINDOW, PACKED)),
                (_consume, (2, work, QUERIES, CAUSAL, WINDOW, PACKED)),
                (_consume, (3, work, QUERIES, CAUSAL, WINDOW, PACKED)),
                (_produce, (loads, QUERIES, CAUSAL, WINDOW, PACKED)),
            ],
            [4, 4, 4, 1],
            [112, 112, 112, 24],
        )


def choose_tiling(head_dim: int, full: bool, heads: int, sequence: int, programs: int) -> Tiling:
    """Return the tiling that ends first if each program computes one tile a round.

    Few heads or short sequences leave programs idle with large tiles. full: neither masked nor packed. heads: of all
    batches.
    """
    small = TILES[head_dim]
    large = FULL_TILES.get(head_dim)
    if not full or large is None:
        return small
    rounds, large_rounds = (
        cdiv(heads * cdiv(sequence, ROWS.value * tiling.consumers), programs) for tiling in (small, large)
    )
    return large if FULL_TIME * large_rounds < rounds else small


def launch_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, save_logsumexp: bool, causal: bool, window: int,
    offsets: torch.Tensor | None, out: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return out, made by `empty_output`, and with save_logsumexp logsumexp2.

    offsets: of packed sequences. out: memory for the result, which fits a descriptor.
    """
    batch, heads, sequence, head_dim = q.shape
    out = empty_output(q, offsets) if out is None else out
    logsumexp2 = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device) if save_logsumexp else None
    if q.numel() == 0:
        return out, logsumexp2
    sequences, packed = packed_sizes(offsets)
    programs = multiprocessors(q.device)
    tiling = choose_tiling(head_dim, not causal and not packed, batch * heads, sequence, programs)
    queries = ROWS.value * tiling.consumers
    tiles = sequence // queries + sequences if packed else cdiv(sequence, queries)
    sharing = heads // k.shape[1]
    together = max(1, L2_BYTES // (2 * k.element_size() * sequence * head_dim)) * sharing
    by_tma = head_dim < 256 and not packed
    with device_of(q), computing(*FORWARD_BY_CASE[causal, False]):
        hopper_attention_forward_kernel[(min(programs, batch * heads * tiles),)](
            rows_descriptor(q, ROWS.value), rows_descriptor(k, tiling.keys), rows_descriptor(v, tiling.keys),
            *((rows_descriptor(out, ROWS.value), None) if by_tma else (None, out)), logsumexp2, zero_counters(q, 2),
            offsets, *out.stride()[:3], sequence, batch * heads, together, tiles, heads, sharing, sequences,
            head_dim**-0.5 * LOG2_E.value, CONSUMERS=tiling.consumers, Q_STAGES=tiling.q_stages,
            K_STAGES=tiling.k_stages, V_STAGES=tiling.v_stages, CAUSAL=causal, WINDOW=window, PACKED=packed,
            num_warps=4,
        )
    return out, logsumexp2
