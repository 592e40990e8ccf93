"""out = softmax(masked(q k^T / sqrt(head_dim))) v (arXiv 1706.03762).

Without a mask every query sees all keys. A causal query sees its own and earlier positions; a window leaves only the
latest `window` of these, its own included (window 0: no window). k and v may have fewer heads. Each then serves
heads / kv_heads consecutive heads of q (grouped queries, arXiv 2305.13245).
"""

import math
from collections.abc import Callable

from ..block import Block
from ..case import Case, Shape, Sizes
from ..common_rows import (
    compilers,
    contiguous_rows_only,
    cuda_graphs,
    flash_attention_4,
    flex_in_tf32,
    half_precision_only,
    pallas,
    tokamax,
    triton,
    xla_tf32x3,
    xla_triton,
)
from ..implementation import Implementation
from ..tensor import Tensor


def reference(xp, inputs, causal, window):  # type: ignore[no-untyped-def]
    q, k, v = inputs["q"], inputs["k"], inputs["v"]
    batch, heads, sequence, head_dim = q.shape
    kv_heads = k.shape[1]
    q = q.reshape(batch, kv_heads, heads // kv_heads, sequence, head_dim)
    scores = q @ k[:, :, None].mT / math.sqrt(head_dim)
    if causal:
        square = xp.ones_like(scores)
        seen = xp.tril(square) - xp.tril(square, -window) if window else xp.tril(square)
        scores = xp.where(seen > 0, scores, -math.inf)
    exponentials = xp.exp(scores - xp.amax(scores, axis=-1, keepdims=True))
    out = exponentials / xp.sum(exponentials, axis=-1, keepdims=True) @ v[:, :, None]
    return {"out": out.reshape(batch, heads, sequence, head_dim)}


def flops(sizes: Sizes) -> float:
    """Count two products of head_dim for each visible pair of query and key; a causal square or window counts half."""
    sequence = sizes["sequence"]
    width = min(sizes["window"] or sequence, sequence)
    pairs = sequence * width - width * width / 2 if sizes["causal"] else sequence * sequence
    return 2 * 2 * sizes["batch"] * sizes["heads"] * pairs * sizes["head_dim"]


# XLA's training step in bf16 saves this much, with temporaries: 11.06 GiB for 2 x 32 x 4096^2 scores.
BYTES_A_SCORE = 12


def working_bytes(sizes: Sizes) -> int:
    return BYTES_A_SCORE * sizes["batch"] * sizes["heads"] * sizes["sequence"] ** 2


Q_AXES = ("batch", "heads", "sequence", "head_dim")
KV_AXES = ("batch", "kv_heads", "sequence", "head_dim")


def sizes(
    batch: int, heads: int, sequence: int, head_dim: int, kv_heads: int | None = None, causal: int = 1, window: int = 0
) -> Sizes:
    return {
        "batch": batch, "heads": heads, "kv_heads": kv_heads or heads, "sequence": sequence, "head_dim": head_dim,
        "causal": causal, "window": window,
    }


# The rows of the public shapes. None stores scores, which take up to 34 GB in bfloat16.
PUBLIC = ("triton", "fa4", "sdpa-cudnn", "flex", "xla-cudnn")


def sdpa_unsupported(what: str) -> Callable[[Case], str | None]:
    def unsupported(case: Case) -> str | None:
        if case.sizes["window"]:
            return "F.scaled_dot_product_attention takes a window only as a mask in memory, which these kernels refuse"
        return half_precision_only(what)(case) or contiguous_rows_only(what)(case)

    return unsupported


def cudnn_unsupported(case: Case) -> str | None:
    if case.sizes["sequence"] == 1:
        return "cuDNN attention takes no sequence of length 1"
    return half_precision_only("cuDNN attention")(case)


def sdpa_efficient_unsupported(case: Case) -> str | None:
    """Take float32 only: for 16-bit types PyTorch prefers FlashAttention-2 and cuDNN, which have rows."""
    if case.dtype != "float32":
        return f"the memory-efficient kernels are PyTorch's choice for float32, not for {case.dtype}"
    if case.sizes["window"]:
        return "F.scaled_dot_product_attention takes a window only as a mask in memory"
    if case.sizes["kv_heads"] != case.sizes["heads"]:
        return "the memory-efficient kernels take no shared heads of k and v"
    return contiguous_rows_only("the memory-efficient kernels")(case)


def sdpa_cudnn_unsupported(case: Case) -> str | None:
    return cudnn_unsupported(case) or sdpa_unsupported("cuDNN attention")(case)


def jax_cudnn_unsupported(case: Case) -> str | None:
    """Refuse odd sequences in training, as jax 0.11.2 does for gradients and for a bias."""
    if case.direction == "train" and case.sizes["sequence"] % 2:
        return f"jax's cuDNN attention trains on even sequence lengths only, not {case.sizes['sequence']}"
    return cudnn_unsupported(case)


def pallas_unsupported(case: Case) -> str | None:
    sequence, head_dim, window = (case.sizes[axis] for axis in ("sequence", "head_dim", "window"))
    if window:
        return "hand-written Pallas attention has no window"
    if head_dim not in (64, 128):
        return f"hand-written Pallas attention has tiles for head_dim 64 and 128, not {head_dim}"
    if sequence % 8:
        return f"hand-written Pallas copies tiles of whole 8 x 64 pieces, which a sequence of {sequence} does not fill"
    return None


LIBRARY = "xlafuse.triton_side.library.attention"

BLOCK = Block(
    name="attention",
    summary="attention, plainly written: scores, mask, softmax, times V; causal, windows, shared heads",
    inputs=(Tensor("q", Q_AXES), Tensor("k", KV_AXES), Tensor("v", KV_AXES)),
    outputs=(Tensor("out", Q_AXES),),
    reference=reference,
    backward_needs=("q", "k", "v"),
    flops=flops,
    backward_flops=lambda s: 2.5 * flops(s),  # five products against two
    work="flops",
    slices=("batch", ("kv_heads", "heads")),
    working_bytes=working_bytes,
    parameters=("causal", "window"),
    autotuned_in_quick=("fwd",),
    sizes=sizes,
    shapes=(
        Shape("llama-8b", sizes(2, 32, 4096, 128), quick=True),
        Shape(
            "gqa-window", sizes(1, 32, 4096, 128, kv_heads=8, window=1024), quick=True,
        ),
        Shape("odd-length", sizes(1, 3, 1002, 64), ("float16",), edge=True),
        Shape("gpt2", sizes(8, 12, 1024, 64)),
        Shape("gpt2-fp16", sizes(8, 12, 1024, 64), ("float16",), quick=True),
        Shape("gpt2-fp32", sizes(8, 12, 1024, 64), ("float32",), ("ieee", "tf32"), quick=True),
        Shape("llama-3-8b-8k", sizes(1, 32, 8192, 128, kv_heads=8)),
        Shape("full", sizes(4, 16, 2048, 64, causal=0)),
        Shape("gemma-2-9b", sizes(1, 16, 2048, 256, kv_heads=8)),
        Shape("window-16k", sizes(1, 16, 16384, 128, kv_heads=8, window=4096)),
        # Models and sizes of NVIDIA's published benchmark, cudnn-frontend's benchmark/attention_training, up to 16k: at
        # 32k the independent evaluation in bfloat16 would hold 148 GB.
        Shape("public-llama-3.1-2k", sizes(2, 64, 2048, 128, kv_heads=8), implementations=PUBLIC),
        Shape(
            "public-llama-3.1-8k", sizes(2, 64, 8192, 128, kv_heads=8),
            implementations=(*PUBLIC, "triton-deterministic"),
        ),
        Shape("public-llama-3.1-8k-full", sizes(2, 64, 8192, 128, kv_heads=8, causal=0), implementations=PUBLIC),
        Shape(
            "public-qwen-3.5-2k", sizes(1, 32, 2048, 256, kv_heads=2),
            implementations=(*PUBLIC, "triton-deterministic"),
        ),
        Shape("public-qwen-3.5-8k", sizes(1, 32, 8192, 256, kv_heads=2), implementations=PUBLIC),
        Shape("public-qwen-3.5-16k", sizes(1, 32, 16384, 256, kv_heads=2), implementations=PUBLIC),
        Shape(
            "public-gpt-oss-8k", sizes(2, 64, 8192, 64, kv_heads=8, window=128), implementations=PUBLIC,
        ),
        # The size of Triton's tutorial on fused attention.
        Shape("public-tutorial-4k", sizes(4, 32, 4096, 64), implementations=PUBLIC),
        # Forward only: with one key the gradients of q and k are exactly zero, and a relative error has no scale.
        Shape("one-token", sizes(1, 32, 1, 128), directions=("fwd",)),
        Shape("odd", sizes(1, 2, 67, 32), ("float32", "float16", "bfloat16"), edge=True),
        Shape("tiny-token", sizes(2, 1, 1, 16), ("float32", "float16", "bfloat16"), directions=("fwd",), edge=True),
        Shape("odd-window", sizes(1, 6, 67, 16, kv_heads=2, window=19), ("float32", "float16"), edge=True),
        Shape("own-key", sizes(1, 2, 5, 16, kv_heads=1, window=1), ("float32",), directions=("fwd",), edge=True),
        Shape("odd-full", sizes(2, 2, 37, 32, kv_heads=1, causal=0), ("float32", "float16"), edge=True),
        # The last tiles of 128 queries and 128 keys have 72 or 8 rows.
        Shape("tiles", sizes(1, 4, 200, 64, kv_heads=2), ("bfloat16", "float16"), edge=True),
        # With one head of k and v in one batch, XLA's CPU compiler (jax 0.11.2, YNNPACK) makes wrong code.
        Shape("tiles-full", sizes(1, 4, 136, 128, kv_heads=2, causal=0), ("bfloat16",), edge=True),
        Shape("two-tokens", sizes(1, 1, 2, 64), ("float32", "float16", "bfloat16"), edge=True),
        Shape(
            "transposed", sizes(1, 4, 37, 16, kv_heads=2), ("float32", "bfloat16"),
            directions=("train",), layout="transposed", edge=True,
        ),
    ),
    implementations=(
        *compilers("attention"), xla_tf32x3("attention"),
        Implementation(
            "xla-cudnn", "xlafuse.blocks.attention:apply_cudnn", "xla",
            'jax.nn.dot_product_attention(implementation="cudnn")',
            needs_gpu="cuDNN's attention needs a GPU with cuDNN to build its plan",
            unsupported=jax_cudnn_unsupported,
        ),
        Implementation(
            "sdpa-flash", f"{LIBRARY}:apply_flash", "eager", "F.scaled_dot_product_attention, FlashAttention-2",
            needs_gpu="the CUDA FlashAttention kernels need a GPU",
            unsupported=sdpa_unsupported("FlashAttention-2"),
        ),
        Implementation(
            "sdpa-efficient", f"{LIBRARY}:apply_efficient", "eager",
            "F.scaled_dot_product_attention, the memory-efficient kernels",
            needs_gpu="the CUDA memory-efficient kernels need a GPU",
            unsupported=sdpa_efficient_unsupported,
        ),
        Implementation(
            "sdpa-cudnn", f"{LIBRARY}:apply_cudnn", "eager", "F.scaled_dot_product_attention, cuDNN",
            needs_gpu="cuDNN's attention needs a GPU with cuDNN to build its plan",
            unsupported=sdpa_cudnn_unsupported,
        ),
        Implementation(
            "flex", f"{LIBRARY}:apply_flex", "flex", "FlexAttention with a block mask, compiled",
            needs_gpu="FlexAttention picks its kernel and runs on a GPU",
            unsupported=flex_in_tf32,
        ),
        triton("attention"),
        Implementation(
            "triton-deterministic", "xlafuse.triton_side.kernels.attention:apply_deterministic", "triton",
            "hand-written Triton with gradients that repeat bit for bit", directions=("train",), by_shape=True,
        ),
        pallas("attention", pallas_unsupported),
        flash_attention_4(), tokamax("attention", "dot_product_attention"), xla_triton("attention"),
        *cuda_graphs("attention"),
    ),
)
