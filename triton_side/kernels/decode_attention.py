"""Attention of a sequence's newest tokens to the keys in its cache. Splitting the keys fills a GPU even at batch 1.

    out[b, h, i] = softmax(q[b, h, i] k[b, h // group]^T / sqrt(head_dim)) v[b, h // group] over the first
    lengths[b] - queries + 1 + i keys

The queries are the last tokens of each sequence: one in plain decoding, a few where drafted tokens are verified
(speculative decoding, arXiv 2211.17192) or a prompt is read in pieces.

Flash-Decoding (Dao, Haziza, Massa, Sizov, https://pytorch.org/blog/flash-decoding/): a program takes a `chunk` of one
sequence's keys. Its rows are all queries of all query heads that share their kv head, so every key is read once. It
keeps the maximum, the sum and the unnormalised output of an online softmax. A second kernel combines the chunks if
there are several; chunks past a sequence's length do no work. Exponentials are base 2 with log2(e) folded into the
scale. A query without keys gives zeros. Forward only, because caches are read at inference.

Shapes: q, out [batch, heads, queries, head_dim], or [batch, heads, head_dim] of one query; k, v [batch, kv_heads,
capacity, head_dim], or pages (decode_attention_paged.py); lengths [batch], int32. dtypes: bfloat16, float16, float32.
Scores, softmax and accumulators are float32; the probabilities are cast to v's dtype for the second product. float32
products follow `torch.get_float32_matmul_precision()`. Where that is "highest" they are IEEE products for a tile of
fewer than 16 rows: 16 are the least for the tensor cores, and reading the cache takes longer than so few products.

A chunk of 2048 keys of head_dim 128 is 1 MB of bfloat16. Its partial results for four query heads are 2 KB of float32,
written and read once; for 16 queries of four heads 32 KB.
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
# A chunk has at least this many keys a row of its tile, so partial results are at most 1/32 of the bytes of 16-bit keys
# and values.
KEYS_A_ROW = 64
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

    Each element of k and v meets all queries of the query heads that share its head. The few pairs that causality hides
    count, because the launch does not know them.
    """
    rows = math.prod(shapes["q_ptr"][1:-1]) // shapes["k_ptr"][1]
    return 2 * 2 * rows * cache_elements(shapes)


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
    stride_qb, stride_qh, stride_qq, stride_qd, stride_kb, stride_kh, stride_ks, stride_kd,
    stride_vb, stride_vh, stride_vs, stride_vd, head_rows, query_rows,
    kv_heads, capacity, pages_per_sequence, splits, chunk, scale_log2e,
    GROUP: tl.constexpr, QUERIES: tl.constexpr, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_KV: tl.constexpr,
    PAGE_SIZE: tl.constexpr, PRECISION: tl.constexpr,
):
    """Attend from the QUERIES of the GROUP query heads of one kv head, padded to ROWS, to one chunk of its keys.

    out has a row of HEAD_DIM for each query of each head of each sequence; it is `head_rows` rows from head to head and
    `query_rows` from query to query. With max_ptr and sum_ptr [rows, splits], out is the chunk's unnormalised output
    [rows, splits, HEAD_DIM] instead.

    The first stride of k and v is from sequence to sequence, or with a page table from page to page.
    """
    split = tl.program_id(0) % splits
    kv_head = (tl.program_id(0) // splits % kv_heads).to(tl.int64)
    batch = (tl.program_id(0) // (splits * kv_heads)).to(tl.int64)
    length = tl.minimum(tl.load(lengths_ptr + batch), capacity)
    begin = split * chunk
    if (begin >= length) & (split > 0):
        return

    tile_row = tl.arange(0, ROWS)
    dim = tl.arange(0, HEAD_DIM)
    head = kv_head * GROUP + tile_row // QUERIES
    query = tile_row % QUERIES
    own = tile_row < GROUP * QUERIES
    # The number of keys that a row sees: a scalar where it is the same for all.
    seen = length if QUERIES == 1 else length - (QUERIES - 1) + query
    q = tl.load(
        q_ptr + batch * stride_qb + head[:, None] * stride_qh + query[:, None] * stride_qq + dim[None, :] * stride_qd,
        mask=own[:, None], other=0.0,
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
        visible = exists[None, :] if QUERIES == 1 else key[None, :] < seen[:, None]
        scores = tl.where(visible, product(q, k.T, PRECISION), float("-inf"))
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

    row = batch * kv_heads * GROUP * QUERIES + head * head_rows + query * query_rows
    if max_ptr is None:
        accumulator = accumulator / tl.where(seen > 0, row_sum, 1.0)[:, None]
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
    partial_ptr, max_ptr, sum_ptr, lengths_ptr, out_ptr, rows, query_rows, capacity, splits, chunk,
    QUERIES: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SPLITS: tl.constexpr,
):
    """Compute one of a sequence's `rows` of out from the chunks that have keys, or from an empty first chunk."""
    row = tl.program_id(0).to(tl.int64)
    length = tl.minimum(tl.load(lengths_ptr + row // rows), capacity)
    seen = length if QUERIES == 1 else length - (QUERIES - 1) + row // query_rows % QUERIES
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
    out = accumulator / tl.where(seen > 0, row_sum, 1.0)
    tl.store(out_ptr + row * HEAD_DIM + dim, out.to(out_ptr.dtype.element_ty))


def split_keys(capacity: int, programs: int, mps: int, block_kv: int, rows: int) -> int:
    """Return the chunk: a multiple of block_kv, at most LONGEST_CHUNK unless the tile has many rows.

    With `programs` programs a chunk, there are as many as `mps` multiprocessors run at once.
    """
    splits = max(1, PROGRAMS_PER_MULTIPROCESSOR * mps // programs)
    keys = min(cdiv(capacity, splits), max(LONGEST_CHUNK, KEYS_A_ROW * rows))
    return max(1, cdiv(keys, block_kv)) * block_kv


def choose_product(rows: int, dtype: torch.dtype) -> tuple[str, int]:
    """Return the precision of the products, and the rows of the tile that holds these.

    A tile's rows are a power of two, and at least 16 for tensor cores.
    """
    precision, padded = product_precision(dtype), next_power_of_2(rows)
    if precision == "tf32x3" and rows < 16:
        precision = "ieee"
    return precision, padded if dtype == torch.float32 and precision == "ieee" else max(16, padded)


@tuned
def decode_config(
    rows: int, dtype: torch.dtype, precision: str, paged: bool, capacity: int, programs: int, mps: int
) -> DecodeConfig:
    """Tiles of 64 keys, 32 in float32, with two tiles of k and two of v in use or in flight: 64 KB at head_dim 128.

    Pages take two more stages, because the table's entries are loaded before the keys. More rows have more warps, so
    nothing spills (cuobjdump, sm_90, up to 128 rows; in float32 up to 32). With 64 rows in 16 bits, one warp group owns
    a product of tensor cores; with eight warps, both groups would compute all scores. The loop over 64 keys of
    head_dim 128 then has 608 instead of 1022 instructions a scheduler, and with 32 rows 506 instead of 654 (SASS). At
    the bandwidth of an H200, those keys and values take about 1,600 cycles.
    """
    block_kv = 32 if dtype == torch.float32 else 64
    chunk = split_keys(capacity, programs, mps, block_kv, rows)
    four_warps = 16 if dtype == torch.float32 else 64
    return DecodeConfig(chunk, block_kv, num_warps=4 if rows <= four_warps else 8, num_stages=5 if paged else 3)


def launch(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor, page_table: torch.Tensor | None,
    config: DecodeConfig | None = None,
) -> torch.Tensor:
    """Return out, contiguous, of q's shape.

    q is [batch, heads, head_dim] or [batch, heads, queries, head_dim], and k and v are [batch, kv_heads, capacity,
    head_dim]. With a page table q is [batch, heads, head_dim] or [batch, queries, heads, head_dim], and k and v are
    [pages, kv_heads, page_size, head_dim]. Any strides; lengths and page_table are contiguous.
    """
    _, kv_heads, capacity, _ = k.shape
    page_size, pages = 1, 0
    if page_table is not None:
        page_size, pages = capacity, page_table.shape[1]
        capacity = page_size * pages
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if q.numel() == 0:
        return out
    batch, heads, head_dim = len(q), q.shape[1 if page_table is None else -2], q.shape[-1]
    queries = math.prod(q.shape[1:-1]) // heads
    # For one query, the arguments of its axis are 1, which Triton compiles in.
    first, *middle, last = q.stride()
    if q.ndim == 3:
        strides, head_rows, query_rows = (first, *middle, 1, last), 1, 1
    elif page_table is None:
        strides, head_rows, query_rows = (first, *middle, last), queries, 1
    else:
        strides, head_rows, query_rows = (first, *reversed(middle), last), 1, heads
    group = heads // kv_heads
    precision, rows = choose_product(group * queries, q.dtype)
    if config is None:
        paged, programs = page_table is not None, batch * kv_heads
        config = decode_config(rows, q.dtype, precision, paged, capacity, programs, multiprocessors(q.device))
    splits = max(1, cdiv(capacity, config.chunk))

    def attend(out: torch.Tensor, maxima: torch.Tensor | None, sums: torch.Tensor | None) -> None:
        decode_attention_kernel[(batch * kv_heads * splits,)](
            q, k, v, page_table, lengths, out, maxima, sums, *strides, *k.stride(), *v.stride(), head_rows, query_rows,
            kv_heads, capacity, pages, splits, config.chunk, head_dim**-0.5 * LOG2_E.value,
            GROUP=group, QUERIES=queries, ROWS=rows, HEAD_DIM=head_dim, BLOCK_KV=config.block_kv,
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
            torch.empty((batch, heads * queries, splits, *rest), dtype=torch.float32, device=q.device)
            for rest in ((head_dim,), (), ())
        )
        with computing(*operations, **names, out_ptr="partial"):
            attend(partial, maxima, sums)
        # Several queries have enough rows to fill the GPU with programs of one warp.
        block_splits, warps = (16, 4) if queries == 1 else (min(16, next_power_of_2(splits)), 1)
        combine_splits_kernel[(batch * heads * queries,)](
            partial, maxima, sums, lengths, out, heads * queries, query_rows, capacity, splits, config.chunk,
            QUERIES=queries, HEAD_DIM=head_dim, BLOCK_SPLITS=block_splits, num_warps=warps,
        )
    return out


def check_query(q: torch.Tensor, axes: tuple[str, ...], kv_heads: int, lengths: torch.Tensor) -> None:
    """Raise unless q of these axes, or without queries, fits kv_heads and lengths, and the kernels.

    Raises:
        ValueError: a shape or device does not fit.
        TypeError: lengths are not int32.
    """
    one = ("batch", "heads", "head_dim")
    if q.ndim not in (len(one), len(axes)) or kv_heads == 0:
        raise ValueError(
            f"q must be [{', '.join(one)}] or [{', '.join(axes)}], and the cache not empty, got {tuple(q.shape)} and "
            f"{kv_heads} kv_heads"
        )
    heads = q.shape[(one if q.ndim == len(one) else axes).index("heads")]
    if heads % kv_heads:
        raise ValueError(
            f"q's heads must be a multiple of the cache's {kv_heads}, got {heads} in {tuple(q.shape)}; q is "
            f"[{', '.join(one)}] or [{', '.join(axes)}]"
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

    Several queries are the last tokens of each sequence: query i of n sees the first length - n + 1 + i keys.

    Args:
        q: [batch, heads, head_dim], bfloat16, float16 or float32: one token a sequence; or [batch, heads, queries,
            head_dim]. A tile has a row for each query of each head that shares a kv head; 512 rows of head_dim 128
            spill.
        k_cache, v_cache: [batch, kv_heads, capacity, head_dim] of q's dtype, as transformers' StaticCache and
            scaled_dot_product_attention have them; any strides are read without a copy. Consecutive query heads share
            a kv head. Keys past a sequence's length are not read.
        lengths: [batch], int32. They are not checked, because that would wait for the GPU. A length above capacity
            counts as capacity, one below 1 as 0.

    Returns:
        out of q's shape, contiguous, in q's dtype; zeros for a query that sees no key.

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
    check_query(q, ("batch", "heads", "queries", "head_dim"), k_cache.shape[1], lengths)
    return launch(q, k_cache, v_cache, lengths.contiguous(), None)


def apply(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Run the block `decode_attention`: q, k_cache, v_cache, lengths -> out."""
    return {"out": decode_attention(inputs["q"], inputs["k_cache"], inputs["v_cache"], inputs["lengths"])}
