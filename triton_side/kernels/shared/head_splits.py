"""Splits: the query heads that share a head of k and v, divided among programs where a gradient has few programs.

A program of the gradient owns a tile of keys of one head of k and v, and loops over the queries of all heads that share
it. With few heads of k and v, such programs can be fewer than multiprocessors, and their loops long. Each split takes
an equal part of the sharing heads and stores float32 sums for dk and dv. A second kernel adds the sums of all splits in
order, so results repeat bit for bit.
"""

import heapq
import math
from functools import lru_cache

import torch
import triton
import triton.language as tl

from xlafuse.triton_side.calls.declare import declare, gradient
from xlafuse.triton_side.kernels.shared.attention_tiles import output_strides
from xlafuse.triton_side.kernels.shared.launch import cdiv, device_of, multiprocessors

# The sums of a program are 8 bytes for each key and number of head_dim, written and read once. At 4 TB/s they take as
# long as 192 queries of its loop at 500 TFLOP/s. 256 queries take about 10 us with head_dim 128, and 5 us with 64: a
# second launch. The last three were fitted to 13 shapes on an H200 (docs/kernels/attention.md).
SUM_QUERIES = 192
LAUNCH_QUERIES = 256
SLOWER_WITH_HEADS = 0.02  # of a causal program's time, for each head that its loop passes: L2 is missed more
MANY_HEADS = 8  # or more share a head of k and v: with 4 the splits of a full grid gained nothing
HOST_QUERIES = 5000  # or fewer: the host's launches are the limit, and splits have one more

SUMS = {"dk_ptr": "dk_sums", "dv_ptr": "dv_sums"}  # names of the gradient's outputs where it has splits


@lru_cache
def head_splits(
    kv_heads: int, sharing: int, sequence: int, keys: int, causal: bool, window: int, multiprocessors: int
) -> int:
    """Return the fewest splits whose estimated time is within 2% of the least; they divide `sharing`.

    The sums take at most as much memory as dq in float32, where the loop keeps two heads or more.

    The time is that of the multiprocessor which ends last, if each takes the next program as soon as it is free, plus
    that of the sums.

    kv_heads: in the whole batch. sharing: query heads that share one of them. keys: rows of a program's tile.
    """
    lengths = [_queries(start, sequence, keys, causal, window) for start in range(0, sequence, keys)]
    slower = SLOWER_WITH_HEADS if causal and not window and sharing >= MANY_HEADS else 0.0

    def time(splits: int) -> float:
        heads, ends = sharing // splits, [0] * multiprocessors
        for length in lengths:
            for _ in range(kv_heads * splits):
                heapq.heapreplace(ends, ends[0] + length * heads)
        sums = LAUNCH_QUERIES + SUM_QUERIES * kv_heads * splits * len(lengths) / multiprocessors
        return max(ends) * (1 + slower * heads) + (sums if splits > 1 else 0)

    if time(1) <= HOST_QUERIES:
        return 1
    times = {splits: time(splits) for splits in range(1, sharing + 1) if sharing % splits == 0}
    return next(splits for splits in times if times[splits] <= 1.02 * min(times.values()))


def _queries(start: int, sequence: int, keys: int, causal: bool, window: int) -> int:
    """Return the number of queries of one head to which a key of the tile from `start` on is visible."""
    end = min(sequence, start + keys - 1 + window) if window else sequence
    return end - start if causal else sequence


@declare(
    gradient("reduce_sum", "scores", "dk"), gradient("reduce_sum", "values", "dv"),
    flops=lambda shapes: 2 * math.prod(shapes["dk_sums_ptr"]),
)
@triton.jit
def attention_sum_splits_kernel(
    dk_sums_ptr, dv_sums_ptr, dk_ptr, dv_ptr, stride_wb, stride_wh, stride_ws, kv_heads, sequence,
    SPLITS: tl.constexpr, HEAD_DIM: tl.constexpr, ROWS: tl.constexpr,
):
    """Compute ROWS rows of dk and dv of one head, whose columns are contiguous, from the sums of SPLITS splits."""
    tiles = tl.cdiv(sequence, ROWS)
    head_index = (tl.program_id(0) // tiles).to(tl.int64)
    row = tl.program_id(0) % tiles * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, HEAD_DIM)[None, :]
    inside = row < sequence
    dk = tl.zeros([ROWS, HEAD_DIM], tl.float32)
    dv = tl.zeros([ROWS, HEAD_DIM], tl.float32)
    for split in tl.range(0, SPLITS, loop_unroll_factor=4):
        offset = ((head_index * SPLITS + split) * sequence + row) * HEAD_DIM + column
        dk += tl.load(dk_sums_ptr + offset, mask=inside, other=0.0)
        dv += tl.load(dv_sums_ptr + offset, mask=inside, other=0.0)
    offset = head_index // kv_heads * stride_wb + head_index % kv_heads * stride_wh + row.to(tl.int64) * stride_ws
    tl.store(dk_ptr + offset + column, dk.to(dk_ptr.dtype.element_ty), mask=inside)
    tl.store(dv_ptr + offset + column, dv.to(dv_ptr.dtype.element_ty), mask=inside)


def choose_splits(
    q: torch.Tensor, k: torch.Tensor, keys: int, causal: bool, window: int, offsets: torch.Tensor | None,
    splits: int | None = None,
) -> int:
    """Return `splits`, or `head_splits` if it is None; 1 for packed sequences, whose lengths are data.

    keys: rows of a program's tile.
    """
    if offsets is not None:
        return 1
    batch, kv_heads, sequence, _ = k.shape
    sharing = q.shape[1] // kv_heads
    found = splits or head_splits(
        batch * kv_heads, sharing, sequence, keys, causal, window, multiprocessors(k.device)
    )
    assert sharing % found == 0, f"{found} splits do not divide {sharing} heads"
    return found


def empty_sums(k: torch.Tensor, splits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return uninitialised float32 memory for dk and dv of each split, [batch, kv_heads * splits, sequence, head_dim].

    The splits of a head are neighbours.
    """
    batch, kv_heads, sequence, head_dim = k.shape
    shape = (batch, kv_heads * splits, sequence, head_dim)
    dk, dv = (torch.empty(shape, dtype=torch.float32, device=k.device) for _ in range(2))
    return dk, dv


def launch_sum_splits(sums: tuple[torch.Tensor, torch.Tensor], dk: torch.Tensor, dv: torch.Tensor) -> None:
    """Write dk and dv, of the same strides with last stride 1, from the sums that `empty_sums` made room for."""
    batch, kv_heads, sequence, head_dim = dk.shape
    rows = 512 // head_dim  # a thread of four warps loads 16 bytes of each split
    with device_of(dk):
        attention_sum_splits_kernel[(batch * kv_heads * cdiv(sequence, rows),)](
            *sums, dk, dv, *output_strides(dk, dv), kv_heads, sequence,
            SPLITS=sums[0].shape[1] // kv_heads, HEAD_DIM=head_dim, ROWS=rows, num_warps=4,
        )
