"""The tile of each attention program, and the keys that are visible to each query.

Sequences have one length, [batch, heads, sequence, ...], or are packed one after the other: [tokens, heads, ...] viewed
as [1, heads, tokens, ...]. Packed sequence i has the tokens offsets[i] .. offsets[i + 1]; other sequences are invisible
to it.

All keys are visible to a query. CAUSAL hides later positions, and WINDOW leaves the latest WINDOW of the rest.
Kernels skip tiles without a visible key, and leave tiles unmasked whose keys are visible to all their queries.
"""

import torch
import triton
import triton.language as tl

from xlafuse.triton_side.kernels.shared.launch import cdiv, next_power_of_2


@triton.jit
def tile_of_program(program, sequence, offsets_ptr, sequences, BLOCK: tl.constexpr, PACKED: tl.constexpr):
    """Return (batch * heads + head, tile, tiles, first, length): the tile of BLOCK rows that a program computes.

    `first` and `length` are the sequence's first row and its number of rows, in rows of the head. For one head, packed
    sequence i has the programs from offsets[i] // BLOCK + i on: enough for its rows, and none shared with another
    sequence. A surplus program gets a tile at or past `tiles`.

    PACKED: a power of two, at least the number of sequences; 0 if they are not packed.
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
def program_number(bias_ptr, sequence, heads, BLOCK: tl.constexpr):
    """Return the number that `tile_of_program` takes.

    Under a bias, the programs for one tile of one head start together for the whole batch, because they read the same
    bias.
    """
    if bias_ptr is not None:
        programs_per_batch = heads * tl.cdiv(sequence, BLOCK)
        batches = tl.num_programs(0) // programs_per_batch
        return tl.program_id(0) % batches * programs_per_batch + tl.program_id(0) // batches
    else:
        return tl.program_id(0)


@triton.jit
def rows_of_head(pointer, strides, batch, head, first, PACKED: tl.constexpr):
    """Return a pointer to row `first` of a head. strides: of batch, head and row."""
    pointer += batch * strides[0] + head * strides[1]
    if PACKED:
        pointer += first.to(tl.int64) * strides[2]
    return pointer


@triton.jit
def load_bias(bias, q_start, kv_start, sequence, HEAD_DIM: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr):
    """Return a tile [BLOCK_Q, BLOCK_KV] of a head's bias times sqrt(HEAD_DIM), float32, -inf past the end.

    It is added to q k^T before that is scaled. bias: (pointer to the head's bias, stride of queries, stride of keys).
    """
    pointer, stride_q, stride_k = bias
    row = tl.arange(0, BLOCK_Q)[:, None]
    column = tl.arange(0, BLOCK_KV)[None, :]
    pointer += tl.cast(q_start, tl.int64) * stride_q + tl.cast(kv_start, tl.int64) * stride_k
    within = (row < sequence - q_start) & (column < sequence - kv_start)
    tile = tl.load(pointer + (row * stride_q + column * stride_k), mask=within, other=float("-inf"))
    return tile.to(tl.float32) * HEAD_DIM**0.5


@triton.jit
def store_scores(pointer, tile, q_start, kv_start, sequence, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr):
    """Store a tile of queries by keys of one head, contiguous at `pointer`."""
    row = q_start + tl.arange(0, BLOCK_Q)[:, None]
    column = kv_start + tl.arange(0, BLOCK_KV)[None, :]
    offset = row.to(tl.int64) * sequence + column
    tl.store(pointer + offset, tile.to(pointer.dtype.element_ty), mask=(row < sequence) & (column < sequence))


@triton.jit
def output_offset(
    head_index, first, heads, sequence, stride_batch, stride_head,
    WIDTH: tl.constexpr, ROW: tl.constexpr, PACKED: tl.constexpr,
):
    """Return (offset of a program's sequence, distance between rows) of an output whose rows are WIDTH elements.

    With ROW 0 the output has the layout of `empty_output`; otherwise its rows are ROW apart and it has these strides.
    ROW is a constant because addresses would take registers: 10 more a thread for dq, and 16 spilled bytes for dk and
    dv (head_dim 128 with shared heads, compiled for an H200 by Triton 3.7).
    """
    if ROW:
        start = head_index // heads * stride_batch + head_index % heads * stride_head
        return start + tl.cast(first, tl.int64) * ROW, tl.cast(ROW, tl.int64)
    elif PACKED:
        return (first.to(tl.int64) * heads + head_index) * WIDTH, tl.cast(heads, tl.int64) * WIDTH
    else:
        return head_index * sequence * WIDTH, WIDTH


@triton.jit
def is_visible(row, column, sequence, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Return whether the keys at `column` are visible to the queries at `row`, which lie within the sequence."""
    if WINDOW:
        return (row >= column) & (row - column < WINDOW)
    elif CAUSAL:
        # Also hides the keys past the end of the sequence.
        return row >= column
    else:
        return column < sequence


@triton.jit
def visible_keys(
    q_start, sequence, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr
):
    """Return (begin, whole_from, whole_until, end): the keys visible to any of the BLOCK_Q queries from q_start on.

    The tiles from whole_from until whole_until are visible to each of these queries, and lie within the sequence.
    """
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
def visible_queries(
    kv_start, sequence, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr
):
    """Return (begin, whole_from, whole_until, end): the queries to which any of BLOCK_KV keys from kv_start is visible.

    All these keys are visible to the queries of the tiles from whole_from until whole_until. All four numbers are
    multiples of BLOCK_Q, except `end` and numbers cut off at the end of the sequence.
    """
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


def visible_pairs(sequence: int, causal: bool, window: int) -> float:
    """Return the number of visible (query, key) pairs of one sequence; a causal triangle counts as half its square."""
    width = min(window or sequence, sequence)
    return sequence * width - width * width / 2 if causal else float(sequence * sequence)


def packed_sizes(offsets: torch.Tensor | None) -> tuple[int, int]:
    """Return the number of packed sequences and `tile_of_program`'s power of two; zeros without offsets."""
    return (0, 0) if offsets is None else (len(offsets) - 1, next_power_of_2(len(offsets) - 1))


def bias_strides(bias: torch.Tensor | None) -> tuple[int, ...]:
    """Return the strides of a bias [heads, queries, keys]; zeros without one."""
    return (0, 0, 0) if bias is None else bias.stride()


def program_count(rows: torch.Tensor, block: int, offsets: torch.Tensor | None) -> int:
    """Return how many programs take tiles of `block` rows of [batch, heads, sequence, head_dim]."""
    batch, heads, sequence, _ = rows.shape
    return batch * heads * (cdiv(sequence, block) if offsets is None else sequence // block + len(offsets) - 1)


def output_strides(*outputs: torch.Tensor | None) -> tuple[int, int, int]:
    """Return the strides of batch, head and row that all `outputs` share; zeros for None, which `empty_output` makes.

    Their last stride must be 1.
    """
    strides = {(0, 0, 0, 1) if out is None else out.stride() for out in outputs}
    ((batch, head, row, column),) = strides
    assert column == 1, "the columns of an output must be contiguous"
    return batch, head, row


def empty_output(like: torch.Tensor, offsets: torch.Tensor | None) -> torch.Tensor:
    """Return an uninitialised output of the shape of `like`, [batch, heads, sequence, head_dim].

    It is contiguous; for packed sequences it is a view of a contiguous [tokens, heads, head_dim].
    """
    if offsets is None:
        return torch.empty(like.shape, dtype=like.dtype, device=like.device)
    _, heads, tokens, head_dim = like.shape
    return torch.empty((1, tokens, heads, head_dim), dtype=like.dtype, device=like.device).transpose(1, 2)
