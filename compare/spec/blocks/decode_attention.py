"""out = softmax(q k^T / sqrt(head_dim)) v of the newest tokens of each sequence, over the keys in its cache.

A shape without `queries` has one new token a sequence, which sees the first `length` keys. With `queries` of them, as
where drafted tokens are verified (speculative decoding, arXiv 2211.17192), query i sees length - queries + 1 + i keys.
Query heads share kv heads in groups (arXiv 2305.13245). A query that sees no key gives zeros. The caches are
[batch, kv_heads, capacity, head_dim], the layout of transformers' StaticCache and F.scaled_dot_product_attention. A
head's keys are contiguous, so its products need no copy.
"""

import math
from typing import Any

from ..block import Block
from ..case import Case, Shape, Sizes
from ..common_rows import compilers, cuda_graphs, flash_attention_4, half_precision_only, triton
from ..implementation import Implementation
from ..tensor import Tensor


def attended(xp, q, k, v, lengths):  # type: ignore[no-untyped-def]
    """Return attention from q [batch, heads, queries, head_dim] to k, v [batch, kv_heads, capacity, head_dim].

    q may lack the axis of queries. The result has q's shape.
    """
    queries = q.shape[2] if q.ndim == 4 else 1
    grouped = q.reshape(len(q), k.shape[1], -1, q.shape[-1])
    scores = grouped @ k.mT / math.sqrt(q.shape[-1])
    row, position = (xp.cumsum(xp.ones_like(x[:, :1, :, 0], dtype=xp.int32), -1) - 1 for x in (grouped, k))
    count = lengths[:, None, None] - queries + 1 + row % queries
    scores = xp.where(position[:, :, None] < count[..., None], scores, -math.inf)
    largest = xp.amax(scores, axis=-1, keepdims=True)
    exponentials = xp.exp(scores - xp.where(largest > -math.inf, largest, 0.0))
    total = xp.sum(exponentials, axis=-1, keepdims=True)
    return (exponentials / xp.where(total > 0, total, 1.0) @ v).reshape(q.shape)


def reference(xp, inputs):  # type: ignore[no-untyped-def]
    return {"out": attended(xp, *(inputs[name] for name in ("q", "k_cache", "v_cache", "lengths")))}


def every_length(sizes: Sizes, capacity: int) -> list[int]:
    """Return lengths from `shortest` to the capacity in equal steps; a single sequence is full."""
    steps = sizes["batch"] - 1
    if steps == 0:
        return [capacity]
    return [sizes["shortest"] + (capacity - sizes["shortest"]) * i // steps for i in range(steps + 1)]


def draw_lengths(generator: Any, sizes: Sizes) -> Any:
    return generator.permutation(every_length(sizes, sizes["capacity"]))


def cached_elements(sizes: Sizes) -> int:
    """Count the elements of k (and of v) that belong to a sequence."""
    return sum(every_length(sizes, sizes["capacity"])) * sizes["kv_heads"] * sizes["head_dim"]


def queries_of(sizes: Sizes) -> int:
    """Return the number of new tokens a sequence."""
    return sizes.get("queries", 1)


def product_flops(sizes: Sizes, lengths: list[int]) -> float:
    """Count two products of head_dim for each visible pair of query and key in each head."""
    queries = queries_of(sizes)
    pairs = sum(max(0, length - queries + 1 + query) for length in lengths for query in range(queries))
    return 2 * 2 * sizes["heads"] * pairs * sizes["head_dim"]


def cudnn_unsupported(case: Case) -> str | None:
    if case.sizes["capacity"] == 1:
        return "cuDNN attention takes no keys of length 1"
    return half_precision_only("cuDNN attention")(case)


def flex_unsupported(case: Case) -> str | None:
    """Refuse groups of heads that are no power of two, many queries of a group, and keys of 2^31 numbers.

    Lengths (128, 1033, 900) on an H200 (torch 2.11.0): with 3 heads that share keys, the second and third sequence were
    wrong, as if all had one block. With 4, which another kernel takes, all were right. With keys of 2^31 numbers Triton
    refused the source: 'block_n_end if block_n_end <= block_n_last_valid else block_n_last_valid' mixes int64 and
    int32.
    """
    group = case.sizes["heads"] // case.sizes["kv_heads"]
    if group & (group - 1):
        return (
            f"FlexAttention uses the first sequence's length for all where {group} heads share keys, no power of two"
        )
    if (reason := flex_refuses_queries(case)) is not None:
        return reason
    keys = math.prod(case.sizes[axis] for axis in CACHE)
    if keys >= 2**31:
        return f"FlexAttention's decoding kernel does not compile for keys of 2^31 numbers or more, here {keys}"
    return None


def flex_refuses_queries(case: Case) -> str | None:
    """Refuse queries whose tile does not divide the mask's blocks of 128 (attention_packed.flex_unsupported)."""
    group, queries = case.sizes["heads"] // case.sizes["kv_heads"], queries_of(case.sizes)
    if queries * group <= 128:
        return None
    return f"FlexAttention's decoding kernel takes no {queries} queries of {group} heads that share keys: over 128"


def flash_unsupported(case: Case) -> str | None:
    if case.sizes["shortest"] != case.sizes["capacity"]:
        return "the mask causal_lower_right knows no lengths, and some sequences do not fill their cache"
    return half_precision_only("FlashAttention-2")(case)


def sizes(
    batch: int, heads: int, kv_heads: int, capacity: int, head_dim: int, shortest: int, queries: int = 1
) -> Sizes:
    several = {} if queries == 1 else {"queries": queries}
    return {
        "batch": batch, "heads": heads, "kv_heads": kv_heads, "capacity": capacity, "head_dim": head_dim,
        "shortest": shortest, **several,
    }


QUERIES = ("batch", "heads", "queries", "head_dim")
OPTIONAL = ("queries",)
CACHE = ("batch", "kv_heads", "capacity", "head_dim")
NEEDS_CUDNN = "cuDNN's attention needs a GPU with cuDNN to build its plan"
LIBRARY = "xlafuse.triton_side.library.decode_attention"

BLOCK = Block(
    name="decode_attention",
    summary="attention of one or a few new tokens to the keys and values in their sequence's cache, heads in groups",
    inputs=(
        Tensor("q", QUERIES, optional=OPTIONAL),
        Tensor("k_cache", CACHE, read=cached_elements),
        Tensor("v_cache", CACHE, read=cached_elements),
        Tensor("lengths", ("batch",), dtype="int32", draw=draw_lengths),
    ),
    outputs=(Tensor("out", QUERIES, optional=OPTIONAL),),
    reference=reference,
    directions=("fwd",),
    flops=lambda s: product_flops(s, every_length(s, s["capacity"])),
    slices=("batch",),
    sizes=sizes,
    shapes=(
        # Full caches: compiled graphs do not know lengths, so their declared reads are right only for full ones.
        Shape("llama-8b-8k", sizes(32, 32, 8, 8192, 128, 8192), quick=True),
        # 1009, 1021 and 1033 keys are primes.
        Shape("odd-lengths", sizes(3, 15, 5, 1033, 64, 1009), ("float16",), edge=True),
        Shape("llama-8b-8k-batch1", sizes(1, 32, 8, 8192, 128, 8192)),
        Shape("llama-8b-64k-batch1", sizes(1, 32, 8, 65536, 128, 65536)),
        Shape("llama-8b-8k-batch128", sizes(128, 32, 8, 8192, 128, 64)),
        # k and v have 2^31 elements each.
        Shape("llama-8b-64k-batch32", sizes(32, 32, 8, 65536, 128, 65536)),
        Shape("gpt2-fp32", sizes(8, 12, 12, 1024, 64, 1024), ("float32",)),
        *(Shape(f"llama-8b-8k-{n}-queries", sizes(32, 32, 8, 8192, 128, 8192, n)) for n in (2, 8, 16)),
        # The sequences have 0, 33 and 67 keys.
        Shape("odd", sizes(3, 6, 2, 67, 16, 0), ("float32", "float16", "bfloat16"), edge=True),
        Shape("tiny-one-key", sizes(2, 3, 3, 1, 16, 1), ("float32", "float16", "bfloat16"), edge=True),
        # The sequences have 0, 22, 44 and 67 keys.
        Shape("odd-5-queries", sizes(4, 6, 2, 67, 16, 0, 5), ("float32", "float16", "bfloat16"), edge=True),
        # The sequences have 1, 5 and 9 keys, so the first queries of two of them see none.
        Shape("fewer-keys-than-queries", sizes(3, 2, 2, 9, 64, 1, 7), ("float32", "float16", "bfloat16"), edge=True),
        Shape("odd-lengths-16-queries", sizes(3, 15, 5, 1033, 128, 1009, 16), ("float16",), edge=True),
    ),
    implementations=(
        *compilers("decode_attention", train=False),
        Implementation(
            "xla-cudnn", "xlafuse.blocks.decode_attention:apply_cudnn", "xla",
            "cuDNN's attention as jax.nn.dot_product_attention calls it, given key_value_seq_lengths, "
            "or a mask for several queries",
            needs_gpu=NEEDS_CUDNN,
            unsupported=cudnn_unsupported,
        ),
        Implementation(
            "sdpa-cudnn", f"{LIBRARY}:apply_cudnn", "eager", "F.scaled_dot_product_attention with a mask, cuDNN",
            needs_gpu=NEEDS_CUDNN,
            unsupported=cudnn_unsupported,
        ),
        Implementation(
            "sdpa-flash", f"{LIBRARY}:apply_flash", "eager",
            "F.scaled_dot_product_attention with causal_lower_right, FlashAttention-2",
            needs_gpu="the CUDA FlashAttention kernels need a GPU",
            unsupported=flash_unsupported,
        ),
        Implementation(
            "flex", f"{LIBRARY}:apply_flex", "flex", "FlexAttention with a block mask of the lengths, compiled",
            needs_gpu="FlexAttention picks its kernel and runs on a GPU",
            unsupported=flex_unsupported,
        ),
        triton("decode_attention"), flash_attention_4("apply_decode"),
        *cuda_graphs("decode_attention", static=("k_cache", "v_cache")),
    ),
)
