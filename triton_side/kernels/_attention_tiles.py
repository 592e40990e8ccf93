"""Where a program of an attention kernel works, and which queries see which keys: tile by tile, and within a tile.

Sequences are of one length each, [batch, heads, sequence, ...]; or packed one after the other, [tokens, heads, ...]
viewed as [1, heads, tokens, ...], where sequence i has the tokens offsets[i] .. offsets[i + 1] and sees itself alone.

A query sees all keys, or (CAUSAL) those at its own position and before, or (and WINDOW) the latest WINDOW of these.
Tiles that nobody sees into are not walked, and those that every query sees whole are not masked.
"""

import torch
import triton
import triton.language as tl

from triton_side.kernels._launch import cdiv, next_power_of_2


@triton.jit
def place(program, sequence, offsets_ptr, sequences, BLOCK: tl.constexpr, PACKED: tl.constexpr):
    """(batch * heads + head, tile, tiles, first, length): which tile of BLOCK rows, of which sequence, is a program's.

    `first` and `length` are in rows of the head. Sequence i of packed ones has the programs of its head from
    offsets[i] // BLOCK + i on: enough for its rows, and no two sequences share one. Those left over get a tile past
    `tiles`. PACKED: a power of two, at least the number of sequences; 0: they are not packed.
    """
    if PACKED:
        programs = sequence // BLOCK + sequences
        slot = program % programs
        i = tl.arange(0, PACKED)
        begin = tl.load(offsets_ptr + i, mask=i < sequences, other=0) // BLOCK + i
        number = tl.sum(((begin <= slot) & (i < sequences)).to(tl.int32), 0) - 1
        first = tl.load(offsets_ptr + number)
        length = tl.load(offsets_ptr + number + 1) - first
        tile = slot - (first // BLOCK + number)
        return (program // programs).to(tl.int64), tile, tl.cdiv(length, BLOCK), first, length
    else:
        tiles = tl.cdiv(sequence, BLOCK)
        return (program // tiles).to(tl.int64), program % tiles, tiles, 0, sequence


@triton.jit
def place_number(bias_ptr, sequence, heads, BLOCK: tl.constexpr):
    """The program's number for `place`: its own; under a bias, such that the programs of one tile of one head, which
    read the same bias, start together for the whole batch."""
    if bias_ptr is not None:
        of_batch = heads * tl.cdiv(sequence, BLOCK)
        batches = tl.num_programs(0) // of_batch
        return tl.program_id(0) % batches * of_batch + tl.program_id(0) // batches
    else:
        return tl.program_id(0)


@triton.jit
def bias_tile(
    bias_ptr, stride_q, stride_k, q_start, kv_start, sequence,
    HEAD_DIM: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr,
):
    """What to add to q k^T before it is scaled: [BLOCK_Q, BLOCK_KV] of a head's bias times sqrt(HEAD_DIM), float32,
    -inf past the end."""
    row = tl.arange(0, BLOCK_Q)[:, None]
    column = tl.arange(0, BLOCK_KV)[None, :]
    bias_ptr += tl.cast(q_start, tl.int64) * stride_q + tl.cast(kv_start, tl.int64) * stride_k
    within = (row < sequence - q_start) & (column < sequence - kv_start)
    tile = tl.load(bias_ptr + (row * stride_q + column * stride_k), mask=within, other=float("-inf"))
    return tile.to(tl.float32) * HEAD_DIM**0.5


@triton.jit
def store_pairs(pointer, tile, q_start, kv_start, sequence, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr):
    """Store a tile of queries by keys of one head, contiguous at `pointer`."""
    row = q_start + tl.arange(0, BLOCK_Q)[:, None]
    column = kv_start + tl.arange(0, BLOCK_KV)[None, :]
    at = row.to(tl.int64) * sequence + column
    tl.store(pointer + at, tile.to(pointer.dtype.element_ty), mask=(row < sequence) & (column < sequence))


@triton.jit
def rows_written(
    head_index, first, heads, sequence, stride_batch, stride_head,
    WIDTH: tl.constexpr, ROW: tl.constexpr, PACKED: tl.constexpr,
):
    """(offset of a program's sequence, distance of rows) of a tensor, whose rows are WIDTH elements side by side: one
    of `empty_rows`, or, where ROW is not 0, one of rows ROW apart and of these strides.

    ROW is compiled in because addresses take registers otherwise: 10 more a thread for dq, and 16 bytes spilled for dk
    and dv (head_dim 128 of shared heads for an H200, Triton 3.7).
    """
    if ROW:
        start = head_index // heads * stride_batch + head_index % heads * stride_head
        return start + tl.cast(first, tl.int64) * ROW, tl.cast(ROW, tl.int64)
    elif PACKED:
        return (first.to(tl.int64) * heads + head_index) * WIDTH, tl.cast(heads, tl.int64) * WIDTH
    else:
        return head_index * sequence * WIDTH, WIDTH


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


def packing(offsets: torch.Tensor | None) -> tuple[int, int]:
    """The number of packed sequences and the power of two that `place` wants; of none, zeros."""
    return (0, 0) if offsets is None else (len(offsets) - 1, next_power_of_2(len(offsets) - 1))


def bias_strides(bias: torch.Tensor | None) -> tuple[int, ...]:
    """Of [heads, queries, keys]; of none, zeros."""
    return (0, 0, 0) if bias is None else bias.stride()


def programs_of(rows: torch.Tensor, block: int, offsets: torch.Tensor | None) -> int:
    """How many programs take tiles of `block` rows of [batch, heads, sequence, head_dim]; see `place`."""
    batch, heads, sequence, _ = rows.shape
    return batch * heads * (cdiv(sequence, block) if offsets is None else sequence // block + len(offsets) - 1)


def written_strides(*given: torch.Tensor | None) -> tuple[int, int, int]:
    """Of the batch, the heads and the rows of tensors that a kernel is given to write, alike, their columns side by
    side; zeros where it is given None and writes what `empty_rows` gives."""
    strides = {(0, 0, 0, 1) if out is None else out.stride() for out in given}
    ((batch, head, row, column),) = strides
    assert column == 1, "columns of what is written lie side by side"
    return batch, head, row


def empty_rows(like: torch.Tensor, offsets: torch.Tensor | None) -> torch.Tensor:
    """[batch, heads, sequence, head_dim] that is contiguous, or of packed sequences as [tokens, heads, head_dim]."""
    if offsets is None:
        return torch.empty(like.shape, dtype=like.dtype, device=like.device)
    _, heads, tokens, head_dim = like.shape
    return torch.empty((1, tokens, heads, head_dim), dtype=like.dtype, device=like.device).transpose(1, 2)
