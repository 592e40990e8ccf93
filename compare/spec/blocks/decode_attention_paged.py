"""decode_attention with keys and values in pages anywhere in memory (PagedAttention, arXiv 2309.06180).

Key i of sequence b is k_pages[page_table[b, i // page_size], i % page_size]. The order of axes is vLLM's and
FlashInfer's: all heads of a token are contiguous, in the pages and in q.
"""

from typing import Any

from ..block import Block
from ..case import Case, Shape, Sizes
from ..common_rows import compilers, cuda_graphs, half_precision_only, triton
from ..implementation import Implementation
from ..tensor import Tensor
from .decode_attention import NEEDS_CUDNN, OPTIONAL, attended, every_length, flex_refuses_queries, product_flops


def reference(xp, inputs):  # type: ignore[no-untyped-def]
    q, table = inputs["q"], inputs["page_table"]

    def gathered(pages):  # type: ignore[no-untyped-def]
        """Return the pages of each sequence as [batch, kv_heads, keys, head_dim]."""
        return pages[table].reshape(len(q), -1, *pages.shape[2:]).swapaxes(1, 2)

    k, v, lengths = gathered(inputs["k_pages"]), gathered(inputs["v_pages"]), inputs["lengths"]
    if q.ndim == 3:
        return {"out": attended(xp, q, k, v, lengths)}
    return {"out": attended(xp, q.swapaxes(1, 2), k, v, lengths).swapaxes(1, 2)}


def lengths_of(sizes: Sizes) -> list[int]:
    return every_length(sizes, sizes["pages_per_sequence"] * sizes["page_size"])


def draw_lengths(generator: Any, sizes: Sizes) -> Any:
    return generator.permutation(lengths_of(sizes))


def draw_page_table(generator: Any, sizes: Sizes) -> Any:
    """Draw different pages for every sequence, in random order."""
    taken = generator.permutation(sizes["pages"])[: sizes["batch"] * sizes["pages_per_sequence"]]
    return taken.reshape(sizes["batch"], sizes["pages_per_sequence"])


def cached_elements(sizes: Sizes) -> int:
    """Count the elements of k (and of v) that belong to a sequence."""
    return sum(lengths_of(sizes)) * sizes["kv_heads"] * sizes["head_dim"]


def named_pages(sizes: Sizes) -> int:
    return sum(-(-length // sizes["page_size"]) for length in lengths_of(sizes))


def cudnn_unsupported(case: Case) -> str | None:
    if case.sizes["pages_per_sequence"] * case.sizes["page_size"] == 1:
        return "cuDNN attention takes no keys of length 1"
    return half_precision_only("cuDNN attention")(case)


def flex_unsupported(case: Case) -> str | None:
    """Refuse page sizes and head groups that FlexAttention's decoding kernel cannot compile.

    A page is a tile of that kernel, and its products need a power of two of keys, at least 16: Triton refused pages of
    8 and 13. Groups of heads that are no power of two go to another kernel, which refused pages of 16 (torch 2.13.0,
    test_deviceless.py).
    """
    page_size, group = case.sizes["page_size"], case.sizes["heads"] // case.sizes["kv_heads"]
    if page_size < 16 or page_size & (page_size - 1):
        return f"FlexAttention takes pages of 16 keys or a larger power of two, not {page_size}"
    if group & (group - 1):
        return f"FlexAttention's decoding kernel takes a power of two of heads that share keys, not {group}"
    return flex_refuses_queries(case)


def sizes(
    batch: int, heads: int, kv_heads: int, page_size: int, pages_per_sequence: int, head_dim: int, shortest: int,
    queries: int = 1,
) -> Sizes:
    several = {} if queries == 1 else {"queries": queries}
    return {
        "batch": batch, "heads": heads, "kv_heads": kv_heads, "page_size": page_size,
        "pages_per_sequence": pages_per_sequence, "pages": batch * pages_per_sequence, "head_dim": head_dim,
        "shortest": shortest, **several,
    }


QUERIES = ("batch", "queries", "heads", "head_dim")
PAGES = ("pages", "page_size", "kv_heads", "head_dim")

BLOCK = Block(
    name="decode_attention_paged",
    summary="decode_attention with the caches in pages, which a table names",
    inputs=(
        Tensor("q", QUERIES, optional=OPTIONAL),
        Tensor("k_pages", PAGES, read=cached_elements),
        Tensor("v_pages", PAGES, read=cached_elements),
        Tensor("page_table", ("batch", "pages_per_sequence"), dtype="int32", draw=draw_page_table, read=named_pages),
        Tensor("lengths", ("batch",), dtype="int32", draw=draw_lengths),
    ),
    outputs=(Tensor("out", QUERIES, optional=OPTIONAL),),
    reference=reference,
    directions=("fwd",),
    flops=lambda s: product_flops(s, lengths_of(s)),
    slices=("batch",),
    sizes=sizes,
    shapes=(
        # vLLM's default page. Full sequences, as in decode_attention.
        Shape("llama-8b-8k", sizes(32, 32, 8, 16, 512, 128, 8192), quick=True),
        # 1007, 1023 and 1040 keys in pages of 13.
        Shape("odd-lengths", sizes(3, 15, 5, 13, 80, 64, 1007), ("float16",), edge=True),
        Shape("llama-8b-8k-batch1", sizes(1, 32, 8, 16, 512, 128, 8192)),
        Shape("llama-8b-64k-batch1", sizes(1, 32, 8, 16, 4096, 128, 65536)),
        Shape("llama-8b-8k-batch128", sizes(128, 32, 8, 16, 512, 128, 64)),
        Shape("gpt2-fp32", sizes(8, 12, 12, 16, 64, 64, 1024), ("float32",)),
        *(Shape(f"llama-8b-8k-{n}-queries", sizes(32, 32, 8, 16, 512, 128, 8192, n)) for n in (2, 8, 16)),
        # The sequences have 0, 32 and 65 keys.
        Shape("odd", sizes(3, 6, 2, 5, 13, 16, 0), ("float32", "float16", "bfloat16"), edge=True),
        # Pages that FlexAttention takes; the sequences have 0, 40 and 80 keys.
        Shape("pages-of-16", sizes(3, 4, 2, 16, 5, 16, 0), ("float32", "float16", "bfloat16"), edge=True),
        Shape("tiny-one-key", sizes(2, 3, 3, 1, 1, 16, 1), ("float32", "float16", "bfloat16"), edge=True),
        # The sequences have 0, 21, 43 and 65 keys.
        Shape("odd-5-queries", sizes(4, 6, 2, 5, 13, 16, 0, 5), ("float32", "float16", "bfloat16"), edge=True),
        # The sequences have 1, 24 and 48 keys, so the first queries of one of them see none.
        Shape(
            "fewer-keys-than-queries", sizes(3, 2, 2, 16, 3, 64, 1, 7), ("float32", "float16", "bfloat16"), edge=True
        ),
        Shape("odd-lengths-16-queries", sizes(3, 15, 5, 13, 80, 128, 1007, 16), ("float16",), edge=True),
    ),
    implementations=(
        *compilers("decode_attention_paged", train=False),
        Implementation(
            "xla-cudnn", "xlafuse.blocks.decode_attention_paged:apply_cudnn", "xla",
            'pages gathered, then jax.nn.dot_product_attention(implementation="cudnn"), given key_value_seq_lengths, '
            "or a mask for several queries",
            needs_gpu=NEEDS_CUDNN,
            unsupported=cudnn_unsupported,
        ),
        Implementation(
            "sdpa-cudnn", "xlafuse.triton_side.library.decode_attention_paged:apply_cudnn", "eager",
            "pages gathered, then F.scaled_dot_product_attention with a mask, cuDNN",
            needs_gpu=NEEDS_CUDNN,
            unsupported=cudnn_unsupported,
        ),
        Implementation(
            "flex", "xlafuse.triton_side.library.decode_attention_paged:apply_flex", "flex",
            "FlexAttention with the page table as its block mask, compiled",
            needs_gpu="FlexAttention picks its kernel and runs on a GPU",
            unsupported=flex_unsupported,
        ),
        triton("decode_attention_paged"),
        *cuda_graphs("decode_attention_paged", static=("k_pages", "v_pages")),
    ),
)
