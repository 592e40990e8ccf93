"""Attention of one new token a sequence to the keys in its cache. Splitting the keys fills a GPU even at batch 1.

    out[b, h] = softmax(q[b, h] k[b, h // group]^T / sqrt(head_dim)) v[b, h // group] over the first lengths[b] keys

Flash-Decoding (Dao, Haziza, Massa, Sizov, https://pytorch.org/blog/flash-decoding/): a program takes a `chunk` of one
sequence's keys and all query heads that share their kv head, so every key is read once. It keeps the maximum, the sum
and the unnormalised output of an online softmax. A second kernel combines the chunks if there are several; chunks past
a sequence's length do no work. Exponentials are base 2 with log2(e) folded into the scale. A sequence without keys
(length 0) gives zeros. Forward only, because caches are read at inference.

Shapes: q, out [batch, heads, head_dim]; k, v [batch, kv_heads, capacity, head_dim], or pages
(decode_attention_paged.py); lengths [batch], int32. dtypes: bfloat16, float16, float32. Scores, softmax and
accumulators are float32; the probabilities are cast to v's dtype for the second product. float32 products follow
`torch.get_float32_matmul_precision()`.

A chunk of 2048 keys of head_dim 128 is 1 MB of bfloat16. Its partial results for four query heads are 2 KB of float32,
written and read once.
"""

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from xlafuse.triton_side.calls.declare import Shapes, computing, declare, forward
from xlafuse.triton_side.configs.tuned import tuned
from xlafuse.triton_side.kernels.shared.constants import LOG2_E, LOWEST
from xlafuse.triton_side.kernels.shared.launch import cdiv, check_tensors, device_of, multiprocessors, next_power_of_2
from xlafuse.triton_side.kernels.shared.tiles import add_product, product, product_precision

HEAD_DIMS = (16, 32, 64, 128)

# A limit even if longer chunks fill the GPU: lengths differ, and the longest sequence would run alone at the end.
LONGEST_CHUNK = 2048
# Three fit (70 KB of shared memory each at head_dim 128). Two have 64 KB in flight even while both compute; an H200
# needs some 36 KB in flight a multiprocessor (4.8 TB/s for 1 us).
PROGRAMS_PER_MULTIPROCESSOR = 2

ATTEND = (
    forward("dot", "scores"), forward("div", "scores"), forward("select", "mask"),
    forward("reduce_max", "softmax/max"), forward("sub", "softmax/exp"), forward("exp", "softmax/exp"),
    forward("reduce_sum", "softmax/sum"), forward("convert", "softmax"), forward("dot", "values"),
)
DIVIDE = forward("div", "softmax/divide")
GATHER = forward("gather", "gather")


def cache_elements(shapes: Shapes) -> int:
    """Return the elements of k, or of v, that lengths can name at most.

    The launch does not know how many they name.
    """
    if "page_table_ptr" not in shapes:
        return math.prod(shapes["k_ptr"])
    return math.prod(shapes["page_table_ptr"]) * math.prod(shapes["k_ptr"][1:])


def attention_flops(shapes: Shapes) -> float:
    """Return the FLOPs of the two products with full caches.

    Each element of k and v meets the query heads that share its head.
    """
    group = shapes["q_ptr"][1] // shapes["k_ptr"][1]
    return 2 * 2 * group * cache_elements(shapes)


@dataclass(frozen=True)
class DecodeConfig:
    """chunk: keys of a program, read `block_kv` (a power of two) at a time."""

    chunk: int
    block_kv: int
    num_warps: int
    num_stages: int


@declare(*ATTEND, DIVIDE, flops=attention_flops, reads={"k_ptr": cache_elements, "v_ptr": cache_elements})
@triton.jit
def decode_attention_kernel(
    q_ptr, k_ptr, v_ptr, page_table_ptr, lengths_ptr, out_ptr, max_ptr, sum_ptr,
    stride_qb, stride_qh, stride_qd, stride_kb, stride_kh, stride_ks, stride_kd,
    stride_vb, stride_vh, stride_vs, stride_vd, kv_heads, capacity, pages_per_sequence, splits, chunk, scale_log2e,
    GROUP: tl.constexpr, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_KV: tl.constexpr, PAGE_SIZE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Attend from the GROUP query heads of one kv head, padded to ROWS, to one chunk of its keys.

    out is [batch, heads, HEAD_DIM]. With max_ptr and sum_ptr [batch, heads, splits], out is the chunk's unnormalised
    output [batch, heads, splits, HEAD_DIM] instead.

    The first stride of k and v is from sequence to sequence, or with a page table from page to page.
    """
    split = tl.program_id(0) % splits
    kv_head = (tl.program_id(0) // splits % kv_heads).to(tl.int64)
    batch = (tl.program_id(0) // (splits * kv_heads)).to(tl.int64)
    length = tl.minimum(tl.load(lengths_ptr + batch), capacity)
    begin = split * chunk
    if (begin >= length) & (split > 0):
        return

    group = tl.arange(0, ROWS)
    dim = tl.arange(0, HEAD_DIM)
    head = kv_head * GROUP + group
    own = group < GROUP
    q = tl.load(
        q_ptr + batch * stride_qb + head[:, None] * stride_qh + dim[None, :] * stride_qd, mask=own[:, None], other=0.0
    )
    k_ptr += kv_head * stride_kh
    v_ptr += kv_head * stride_vh
    # The lowest finite number, not -inf: after a first tile of -inf alone, subtracting a maximum of -inf gives NaN.
    row_max = tl.full([ROWS], LOWEST, tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    accumulator = tl.zeros([ROWS, HEAD_DIM], tl.float32)
    for start in tl.range(begin, tl.minimum(begin + chunk, length), BLOCK_KV):
        key = start + tl.arange(0, BLOCK_KV)
        exists = key < length
        if page_table_ptr is None:
            at = batch
            slot = key.to(tl.int64)
        else:
            page = page_table_ptr + batch * pages_per_sequence + key // PAGE_SIZE
            at = tl.load(page, mask=exists, other=0).to(tl.int64)
            slot = (key % PAGE_SIZE).to(tl.int64)
        k = tl.load(
            k_ptr + (at * stride_kb + slot * stride_ks)[:, None] + dim[None, :] * stride_kd,
            mask=exists[:, None], other=0.0,
        )
        scores = tl.where(exists[None, :], product(q, k.T, PRECISION), float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1) * scale_log2e)
        p = tl.exp2(scores * scale_log2e - new_max[:, None])
        correction = tl.exp2(row_max - new_max)
        row_sum = row_sum * correction + tl.sum(p, 1)
        v = tl.load(
            v_ptr + (at * stride_vb + slot * stride_vs)[:, None] + dim[None, :] * stride_vd,
            mask=exists[:, None], other=0.0,
        )
        accumulator = add_product(accumulator * correction[:, None], p.to(v.dtype), v, PRECISION)
        row_max = new_max

    row = batch * kv_heads * GROUP + head
    if max_ptr is None:
        accumulator = accumulator / tl.where(length > 0, row_sum, 1.0)[:, None]
    else:
        row = row * splits + split
        tl.store(max_ptr + row, row_max, mask=own)
        tl.store(sum_ptr + row, row_sum, mask=own)
    tl.store(
        out_ptr + row[:, None] * HEAD_DIM + dim[None, :], accumulator.to(out_ptr.dtype.element_ty), mask=own[:, None]
    )


@declare(forward("reduce_sum", "values", "splits"), DIVIDE, flops=lambda shapes: 2 * math.prod(shapes["partial_ptr"]))
@triton.jit
def combine_splits_kernel(
    partial_ptr, max_ptr, sum_ptr, lengths_ptr, out_ptr, heads, capacity, splits, chunk,
    HEAD_DIM: tl.constexpr, BLOCK_SPLITS: tl.constexpr,
):
    """Compute out of one head of one sequence from the chunks that have keys, or from an empty first chunk."""
    row = tl.program_id(0).to(tl.int64)
    length = tl.minimum(tl.load(lengths_ptr + row // heads), capacity)
    used = tl.maximum(tl.cdiv(length, chunk), 1)
    dim = tl.arange(0, HEAD_DIM)
    row_max = float("-inf")
    row_sum = 0.0
    accumulator = tl.zeros([HEAD_DIM], tl.float32)
    for start in tl.range(0, used, BLOCK_SPLITS):
        split = start + tl.arange(0, BLOCK_SPLITS)
        exists = split < used
        at = row * splits + split
        maxima = tl.load(max_ptr + at, mask=exists, other=float("-inf"))
        sums = tl.load(sum_ptr + at, mask=exists, other=0.0)
        partial = tl.load(
            partial_ptr + at[:, None] * HEAD_DIM + dim[None, :], mask=exists[:, None], other=0.0
        )
        new_max = tl.maximum(row_max, tl.max(maxima, 0))
        weights = tl.exp2(maxima - new_max)
        correction = tl.exp2(row_max - new_max)
        row_sum = row_sum * correction + tl.sum(weights * sums, 0)
        accumulator = accumulator * correction + tl.sum(weights[:, None] * partial, 0)
        row_max = new_max
    out = accumulator / tl.where(length > 0, row_sum, 1.0)
    tl.store(out_ptr + row * HEAD_DIM + dim, out.to(out_ptr.dtype.element_ty))


def split_keys(capacity: int, programs: int, mps: int, block_kv: int) -> int:
    """Return the chunk: a multiple of block_kv, at most LONGEST_CHUNK.

    With `programs` programs a chunk, there are as many as `mps` multiprocessors run at once.
    """
    splits = max(1, PROGRAMS_PER_MULTIPROCESSOR * mps // programs)
    keys = min(cdiv(capacity, splits), LONGEST_CHUNK)
    return max(1, cdiv(keys, block_kv)) * block_kv


def tile_rows(group: int, dtype: torch.dtype, precision: str) -> int:
    """Return the rows of the tile of query heads: a power of two, and at least 16 for tensor cores."""
    rows: int = next_power_of_2(group)
    return rows if dtype == torch.float32 and precision == "ieee" else max(16, rows)


@tuned
def decode_config(rows: int, dtype: torch.dtype, paged: bool, capacity: int, programs: int, mps: int) -> DecodeConfig:
    """Tiles of 64 keys, 32 in float32, with two tiles of k and two of v in use or in flight: 64 KB at head_dim 128.

    Pages take two more stages, because the table's entries are loaded before the keys. From 32 rows on there are more
    warps, so nothing spills (cuobjdump, sm_90, up to 128 rows; in float32 up to 32).
    """
    block_kv = 32 if dtype == torch.float32 else 64
    chunk = split_keys(capacity, programs, mps, block_kv)
    return DecodeConfig(chunk, block_kv, num_warps=4 if rows <= 16 else 8, num_stages=5 if paged else 3)


def launch(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor, page_table: torch.Tensor | None,
    config: DecodeConfig | None = None,
) -> torch.Tensor:
    """Return out [batch, heads, head_dim], contiguous.

    k and v are [batch, kv_heads, capacity, head_dim], or with a page table [pages, kv_heads, page_size, head_dim], of
    any strides; lengths and page_table are contiguous.
    """
    batch, heads, head_dim = q.shape
    _, kv_heads, capacity, _ = k.shape
    page_size, pages = 1, 0
    if page_table is not None:
        page_size, pages = capacity, page_table.shape[1]
        capacity = page_size * pages
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if q.numel() == 0:
        return out
    precision = product_precision(q.dtype)
    group = heads // kv_heads
    rows = tile_rows(group, q.dtype, precision)
    if config is None:
        paged, programs = page_table is not None, batch * kv_heads
        config = decode_config(rows, q.dtype, paged, capacity, programs, multiprocessors(q.device))
    splits = max(1, cdiv(capacity, config.chunk))

    def attend(out: torch.Tensor, maxima: torch.Tensor | None, sums: torch.Tensor | None) -> None:
        decode_attention_kernel[(batch * kv_heads * splits,)](
            q, k, v, page_table, lengths, out, maxima, sums, *q.stride(), *k.stride(), *v.stride(),
            kv_heads, capacity, pages, splits, config.chunk, head_dim**-0.5 * LOG2_E.value,
            GROUP=group, ROWS=rows, HEAD_DIM=head_dim, BLOCK_KV=config.block_kv,
            PAGE_SIZE=page_size, PRECISION=precision, num_warps=config.num_warps, num_stages=config.num_stages,
        )

    operations, form = (ATTEND, "cache") if page_table is None else ((GATHER, *ATTEND), "pages")
    names = {"k_ptr": f"k_{form}", "v_ptr": f"v_{form}"}
    with device_of(q):
        if splits == 1:
            with computing(*operations, DIVIDE, **names):
                attend(out, None, None)
            return out
        partial, maxima, sums = (
            torch.empty((batch, heads, splits, *rest), dtype=torch.float32, device=q.device)
            for rest in ((head_dim,), (), ())
        )
        with computing(*operations, **names, out_ptr="partial"):
            attend(partial, maxima, sums)
        combine_splits_kernel[(batch * heads,)](
            partial, maxima, sums, lengths, out, heads, capacity, splits, config.chunk,
            HEAD_DIM=head_dim, BLOCK_SPLITS=16, num_warps=4,
        )
    return out


def check_query(q: torch.Tensor, kv_heads: int, lengths: torch.Tensor) -> None:
    """Raise unless q [batch, heads, head_dim] fits kv_heads and lengths, and the kernels.

    Raises:
        ValueError: a shape or device does not fit.
        TypeError: lengths are not int32.
    """
    if q.ndim != 3 or kv_heads == 0 or q.shape[1] % kv_heads:
        raise ValueError(
            f"q must be [batch, heads, head_dim], its heads a multiple of the cache's {kv_heads}, got "
            f"{tuple(q.shape)}; drop the axis of the one token with q.squeeze(2)"
        )
    if q.shape[-1] not in HEAD_DIMS:
        raise ValueError(
            f"head_dim must be one of {HEAD_DIMS}, got {q.shape[-1]}; pad q and the caches with zeros to the next of "
            "them and scale q by sqrt(padded / head_dim)"
        )
    check_indices("lengths", lengths, q, ("batch",))


def check_indices(name: str, indices: torch.Tensor, q: torch.Tensor, axes: tuple[str, ...]) -> None:
    """Raise unless `indices` are int32 of these axes, the first q's batch, on q's device."""
    if indices.dtype != torch.int32:
        raise TypeError(f"{name} must be int32, got {indices.dtype}; cast with .to(torch.int32)")
    if indices.device != q.device:
        raise ValueError(f"{name} must be on {q.device} as q is, got {indices.device}; move with .to(...)")
    if indices.ndim != len(axes) or len(indices) != len(q):
        raise ValueError(
            f"{name} must be [{', '.join(axes)}] for q of batch {len(q)}, got shape {tuple(indices.shape)}"
        )


def decode_attention(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, lengths: torch.Tensor
) -> torch.Tensor:
    """Return softmax(q k^T / sqrt(head_dim)) v over the first `lengths` keys of each sequence, not differentiable.

    Args:
        q: [batch, heads, head_dim], bfloat16, float16 or float32: one token a sequence.
        k_cache, v_cache: [batch, kv_heads, capacity, head_dim] of q's dtype, as transformers' StaticCache and
            scaled_dot_product_attention have them; any strides are read without a copy. Consecutive query heads share
            a kv head. Keys past a sequence's length are not read.
        lengths: [batch], int32. They are not checked, because that would wait for the GPU. A length above capacity
            counts as capacity, one below 1 as 0.

    Returns:
        out [batch, heads, head_dim], contiguous, in q's dtype; zeros where a length is 0.

    Raises:
        ValueError: the shapes or devices do not fit, head_dim is not 16, 32, 64 or 128, the tensors are not on a GPU
            (outside the interpreter), or float32 products are set to "medium".
        TypeError: a dtype is not supported, or they differ.
    """
    check_tensors(q=q, k_cache=k_cache, v_cache=v_cache)
    if k_cache.ndim != 4 or k_cache.shape != v_cache.shape or (len(k_cache), k_cache.shape[-1]) != (
        len(q), q.shape[-1]
    ):
        raise ValueError(
            "k_cache and v_cache must be [batch, kv_heads, capacity, head_dim] of q's batch and head_dim, got "
            f"{tuple(k_cache.shape)} and {tuple(v_cache.shape)} for q {tuple(q.shape)}"
        )
    check_query(q, k_cache.shape[1], lengths)
    return launch(q, k_cache, v_cache, lengths.contiguous(), None)


def apply(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Run the block `decode_attention`: q, k_cache, v_cache, lengths -> out."""
    return {"out": decode_attention(inputs["q"], inputs["k_cache"], inputs["v_cache"], inputs["lengths"])}
