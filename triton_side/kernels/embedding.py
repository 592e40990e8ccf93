"""Rows of a table, looked up by token ids, forward and backward.

    y[t] = table[ids[t]]                 dtable[r] = sum of dy[t] over the tokens t with ids[t] = r, or zero

Shapes: table, dtable [rows, columns], ids [tokens], y, dy [tokens, columns]. bfloat16, float16 or float32 in and out.
Sums are fp32, in the order of the tokens' tiles, rounded once. Every id must be in 0 .. rows - 1; any other id is
undefined behaviour, not an error.

The backward pass writes each row of dtable once, zeros included, and reads each row of dy once. A program takes a block
of rows, finds its tokens in their order by id, and loops over both. Llama 3's table is 1051 MB (128,256 x 4096 of
bfloat16) and dy of 8192 tokens 67 MB; the order adds 0.13 MB.

Atomic additions would need an fp32 table of zeros and a pass that rounds it: 2101 MB written, partly read and written
again, 2101 MB read, and 1051 MB written. Their sums, in any order, would not repeat. Without atomics, results repeat
bit for bit.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from xlafuse.triton_side.calls import declare
from xlafuse.triton_side.configs.tuned import tuned
from xlafuse.triton_side.kernels.shared.launch import (
    cdiv,
    check_matrix,
    check_tensors,
    device_of,
    next_power_of_2,
    with_unit_column_stride,
)

ID_DTYPES = (torch.int32, torch.int64)
SEARCHED = tl.constexpr(128)
NO_ID = tl.constexpr(2**31 - 1)  # larger than any id, because int32 counts the rows


@dataclass(frozen=True)
class EmbeddingConfig:
    """Tiles of `tokens` x `columns` (powers of two) a program; in the backward pass a program has `rows` of dtable.

    Consecutive programs take the columns of one row, so whole rows are in flight at once.
    """

    tokens: int
    columns: int
    num_warps: int
    rows: int = 1


@declare.declare(
    declare.forward("gather", "gather"), flops=lambda shapes: 0,
    reads={"table_ptr": lambda shapes: shapes["ids_ptr"][0] * shapes["table_ptr"][1]},
)
@triton.jit
def embedding_forward_kernel(
    table_ptr, ids_ptr, y_ptr, table_row_stride, tokens, columns,
    TOKENS: tl.constexpr, COLUMNS: tl.constexpr,
):
    across = tl.cdiv(columns, COLUMNS)
    token = (tl.program_id(0) // across * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)[:, None]
    column = tl.program_id(0) % across * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    mask = (token < tokens) & (column < columns)
    row = tl.load(ids_ptr + token, mask=token < tokens, other=0).to(tl.int64)
    y = tl.load(table_ptr + row * table_row_stride + column, mask=mask)
    tl.store(y_ptr + token * columns + column, y, mask=mask)


@declare.declare(declare.gradient("sort", "gather", "order"), flops=lambda shapes: 0)
@triton.jit
def embedding_order_kernel(
    ids_ptr, sorted_ids_ptr, order_ptr, tokens, TILE: tl.constexpr, OTHERS: tl.constexpr,
):
    """Compute the stable order by id.

    A token's rank is the number of tokens with a lower id, plus the earlier tokens with its own id. The kernel compares
    every pair, 67 million for 8192 tokens, and four times as many for twice the tokens.
    """
    own = tl.program_id(0) * TILE
    token = own + tl.arange(0, TILE)
    ids = tl.load(ids_ptr + token, mask=token < tokens, other=NO_ID)
    before = tl.zeros([TILE, OTHERS], tl.int32)
    for start in tl.range(0, tokens, OTHERS):
        other = start + tl.arange(0, OTHERS)
        other_ids = tl.load(ids_ptr + other, mask=other < tokens, other=NO_ID)[None, :]
        if start + OTHERS <= own:  # all earlier
            before += (other_ids <= ids[:, None]).to(tl.int32)
        elif start >= own + TILE:  # all later
            before += (other_ids < ids[:, None]).to(tl.int32)
        else:
            equal_and_earlier = (other_ids == ids[:, None]) & (other[None, :] < token[:, None])
            before += ((other_ids < ids[:, None]) | equal_and_earlier).to(tl.int32)
    rank = tl.sum(before, axis=1)
    tl.store(sorted_ids_ptr + rank, ids, mask=token < tokens)
    tl.store(order_ptr + rank, token, mask=token < tokens)


@declare.declare(
    declare.gradient("scatter_add", "gather", "dtable"), flops=lambda shapes: math.prod(shapes["dy_ptr"])
)
@triton.jit
def embedding_backward_kernel(
    sorted_ids_ptr, order_ptr, dy_ptr, dtable_ptr, dy_row_stride, tokens, rows, columns,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr,
):
    across = tl.cdiv(columns, COLUMNS)
    first_row = tl.program_id(0) // across * ROWS
    column = tl.program_id(0) % across * COLUMNS + tl.arange(0, COLUMNS)
    # Search for the first token of these rows or later ones. Each step compares the last ids of SEARCHED parts, so 8192
    # tokens take two dependent loads.
    position = 0
    end = tokens
    while position < end:
        part = tl.cdiv(end - position, SEARCHED)
        last = position + tl.arange(1, SEARCHED + 1) * part - 1
        ids = tl.load(sorted_ids_ptr + last, mask=last < end, other=NO_ID)
        position += tl.sum((ids < first_row).to(tl.int32), axis=0) * part
        end = tl.minimum(end, position + part - 1)
    next_row = tl.load(sorted_ids_ptr + position, mask=position < tokens, other=NO_ID)
    for row in tl.range(first_row, tl.minimum(first_row + ROWS, rows)):
        total = tl.zeros([COLUMNS], tl.float32)
        while next_row == row:
            # Ids and tokens are loaded together, and neither the next id nor its position waits for dy.
            at = position + tl.arange(0, TOKENS)
            ids = tl.load(sorted_ids_ptr + at, mask=at < tokens, other=NO_ID)
            token = tl.load(order_ptr + at, mask=at < tokens, other=0).to(tl.int64)
            own = ids == row
            dy = tl.load(
                dy_ptr + token[:, None] * dy_row_stride + column[None, :],
                mask=own[:, None] & (column < columns)[None, :], other=0.0,
            )
            total += tl.sum(dy.to(tl.float32), axis=0)
            count = tl.sum(own.to(tl.int32), axis=0)
            position += count
            if count < TOKENS:
                next_row = tl.min(tl.where(own, NO_ID, ids), axis=0)
        dtable_row_ptr = dtable_ptr + tl.cast(row, tl.int64) * columns
        tl.store(dtable_row_ptr + column, total.to(dtable_ptr.dtype.element_ty), mask=column < columns)


@tuned
def configure_forward(columns: int, element_bytes: int) -> EmbeddingConfig:
    """A thread copies 16 bytes of each of four rows."""
    width = min(next_power_of_2(columns), 128 * 16 // element_bytes)
    return EmbeddingConfig(tokens=4, columns=width, num_warps=max(1, width * element_bytes // 512))


@tuned
def configure_backward(columns: int, element_bytes: int) -> EmbeddingConfig:
    """A thread sums 16 bytes of a row, with 32 or 16 tokens in flight.

    One program for each width of columns loops over all tokens of a row, so latency decides. With 16 rows the search
    costs little next to the 32 kB written. Without the order, in us (CUPTI, one H200, bfloat16, 8192 tokens of 3000
    ids by Zipf's law):

        | columns                   2048    4096
        | 32 tokens, 16 rows       191.8   324.5
        | 32 tokens, 32 rows       194.3   331.1
        | 32 tokens, 64 rows       199.1   338.7
        | 16 tokens, 16 rows       221.1   358.1

    In rows that are not aligned 32 tokens would spill 152 bytes a thread.
    """
    width = min(next_power_of_2(columns), 128 * 16 // element_bytes)
    tokens = 32 if columns % 16 == 0 else 16
    return EmbeddingConfig(tokens, columns=width, num_warps=max(1, width * element_bytes // 512), rows=16)


def forward(table: torch.Tensor, ids: torch.Tensor, config: EmbeddingConfig | None = None) -> torch.Tensor:
    """Launch the forward kernel on a contiguous ids; return y [tokens, columns], contiguous, in the table's dtype."""
    tokens, columns = len(ids), table.shape[1]
    y = torch.empty((tokens, columns), dtype=table.dtype, device=table.device)
    if y.numel() == 0:
        return y
    table = with_unit_column_stride(table)
    config = config or configure_forward(columns, table.element_size())
    grid = (cdiv(tokens, config.tokens) * cdiv(columns, config.columns),)
    with device_of(table):
        embedding_forward_kernel[grid](
            table, ids, y, table.stride(0), tokens, columns,
            TOKENS=config.tokens, COLUMNS=config.columns, num_warps=config.num_warps,
        )
    return y


def sort_by_id(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the order kernel on a contiguous ids; return the sorted ids and their tokens, earlier tokens first."""
    sorted_ids, order = torch.empty_like(ids), torch.empty_like(ids)
    # 8192 tokens are 512 programs. On an H200 they take 23.6 us, against 31.8 with 256 other tokens at once (do_bench).
    tile = 16
    with device_of(ids):
        embedding_order_kernel[(cdiv(len(ids), tile),)](
            ids, sorted_ids, order, len(ids), TILE=tile, OTHERS=128, num_warps=4
        )
    return sorted_ids, order


def backward(
    ids: torch.Tensor, dy: torch.Tensor, rows: int, config: EmbeddingConfig | None = None
) -> torch.Tensor:
    """Launch the backward kernels on a contiguous ids; return dtable [rows, columns], contiguous, in dy's dtype."""
    tokens, columns = dy.shape
    if dy.numel() == 0:
        return torch.zeros((rows, columns), dtype=dy.dtype, device=dy.device)
    dtable = torch.empty((rows, columns), dtype=dy.dtype, device=dy.device)
    dy = with_unit_column_stride(dy)
    config = config or configure_backward(columns, dy.element_size())
    sorted_ids, order = sort_by_id(ids)
    grid = (cdiv(rows, config.rows) * cdiv(columns, config.columns),)
    with device_of(dy):
        embedding_backward_kernel[grid](
            sorted_ids, order, dy, dtable, dy.stride(0), tokens, rows, columns,
            ROWS=config.rows, TOKENS=config.tokens, COLUMNS=config.columns, num_warps=config.num_warps,
        )
    return dtable


class EmbeddingFunction(torch.autograd.Function):
    """Save ids. The backward pass reads dy once and writes dtable."""

    @staticmethod
    def forward(ctx: Any, table: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(ids)
        ctx.rows = len(table)
        return forward(table, ids)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None]:
        (ids,) = ctx.saved_tensors
        return backward(ids, dy, ctx.rows), None


def embedding(table: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return table[ids], differentiable once in the table.

    Args:
        table: [rows, columns], bfloat16, float16 or float32, on a GPU. Rows may be any distance apart; a table whose
            last stride is not 1 is copied.
        ids: [tokens], int32 or int64, on the table's device, each in 0 .. rows - 1. They are not checked,
            because that takes a pass over them and a wait for the GPU. Wrong ids read outside the table, and their
            gradients are lost.

    Returns:
        A new contiguous [tokens, columns] tensor of the table's dtype.

    Raises:
        ValueError: the shapes or devices do not fit, or the tensors are not on a GPU.
        TypeError: a dtype is not supported.
    """
    check_tensors(table=table)
    check_matrix("table", table)
    if ids.dtype not in ID_DTYPES:
        raise TypeError(f"ids must be int32 or int64, got {ids.dtype}; cast them with .to(torch.int32)")
    if ids.device != table.device:
        raise ValueError(f"ids must be on {table.device} as the table is, got {ids.device}; move them with .to(...)")
    if ids.ndim != 1:
        raise ValueError(f"ids must be [tokens], got shape {tuple(ids.shape)}; flatten them with .reshape(-1)")
    ids = ids.contiguous()
    if torch.is_grad_enabled() and table.requires_grad:
        return EmbeddingFunction.apply(table, ids)
    return forward(table, ids)


def apply(inputs: dict[str, torch.Tensor], **attributes: Any) -> dict[str, torch.Tensor]:
    """Run the block `embedding`: table[rows, columns], ids[tokens] -> y[tokens, columns]."""
    return {"y": embedding(inputs["table"], inputs["ids"], **attributes)}
