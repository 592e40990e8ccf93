"""Which queries see which keys, for the attention kernels: tile by tile, and within a tile.

A query sees all keys, or (CAUSAL) those at its own position and before, or (and WINDOW) the latest WINDOW of these.
Tiles that nobody sees into are not walked, and those that every query sees whole are not masked.
"""

import triton
import triton.language as tl


@triton.jit
def sees(row, column, sequence, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Whether the queries at `row` see the keys at `column`, of the rows within the sequence."""
    if WINDOW:
        return (row >= column) & (row - column < WINDOW)
    elif CAUSAL:
        # Also hides the keys past the end of the sequence.
        return row >= column
    else:
        return column < sequence


@triton.jit
def keys_seen(
    q_start, sequence, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr
):
    """(begin, whole_from, whole_until, end): the keys that the BLOCK_Q queries from q_start on see, in tiles of which
    those from whole_from until whole_until are seen by every one of them, and lie within the sequence."""
    if CAUSAL:
        whole_until = q_start // BLOCK_KV * BLOCK_KV
        end = tl.minimum(q_start + BLOCK_Q, sequence)
    else:
        whole_until = sequence // BLOCK_KV * BLOCK_KV
        end = sequence
    if WINDOW:
        begin = tl.maximum(q_start + 1 - WINDOW, 0) // BLOCK_KV * BLOCK_KV
        whole_from = tl.cdiv(tl.maximum(q_start + BLOCK_Q - WINDOW, 0), BLOCK_KV) * BLOCK_KV
        return begin, tl.minimum(whole_from, whole_until), whole_until, end
    else:
        return 0, 0, whole_until, end


@triton.jit
def queries_seeing(
    kv_start, sequence, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr
):
    """(begin, whole_from, whole_until, end): the queries that see any of the BLOCK_KV keys from kv_start on, in tiles
    of which those from whole_from until whole_until see them all. All but `end` and what is cut off at the end of the
    sequence are multiples of BLOCK_Q."""
    if CAUSAL:
        begin = kv_start // BLOCK_Q * BLOCK_Q
        whole_from = tl.minimum(tl.cdiv(kv_start + BLOCK_KV, BLOCK_Q) * BLOCK_Q, sequence)
    else:
        begin = 0
        whole_from = 0
    if WINDOW:
        whole_until = tl.maximum((kv_start + WINDOW) // BLOCK_Q * BLOCK_Q, whole_from)
        end = tl.minimum(kv_start + BLOCK_KV - 1 + WINDOW, sequence)
        return begin, whole_from, tl.minimum(whole_until, sequence), end
    else:
        return begin, whole_from, sequence, sequence


def pairs_seen(sequence: int, causal: bool, window: int) -> float:
    """How many keys the queries of one sequence see together; of a causal square, or window, its half."""
    width = min(window or sequence, sequence)
    return sequence * width - width * width / 2 if causal else float(sequence * sequence)
