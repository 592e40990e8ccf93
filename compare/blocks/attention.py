"""out = softmax(causal(q k^T / sqrt(head_dim))) v (arXiv 1706.03762), causal: a query sees itself and earlier keys."""

import math

from compare.implementations import compilers, flash_attention_4, half_precision_only, triton, xla_triton
from compare.spec import Block, Case, Implementation, Shape, Sizes, Tensor


def reference(xp, inputs):  # type: ignore[no-untyped-def]
    q, k, v = inputs["q"], inputs["k"], inputs["v"]
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    seen = xp.tril(xp.ones_like(scores)) > 0
    scores = xp.where(seen, scores, -math.inf)
    exponentials = xp.exp(scores - xp.amax(scores, axis=-1, keepdims=True))
    return {"out": exponentials / xp.sum(exponentials, axis=-1, keepdims=True) @ v}


def causal_flops(sizes: Sizes) -> float:
    """Two products of sequence x sequence x head_dim a head; causal: half the square."""
    return 2 * 2 * sizes["batch"] * sizes["heads"] * sizes["sequence"] ** 2 * sizes["head_dim"] / 2


AXES = ("batch", "heads", "sequence", "head_dim")


def sizes(batch: int, heads: int, sequence: int, head_dim: int) -> Sizes:
    return {"batch": batch, "heads": heads, "sequence": sequence, "head_dim": head_dim}


def cudnn_unsupported(case: Case) -> str | None:
    if case.sizes["sequence"] == 1:
        return "cuDNN attention takes no sequence of length 1"
    return half_precision_only("cuDNN attention")(case)


def jax_cudnn_unsupported(case: Case) -> str | None:
    """jax 0.11.2 refuses an odd sequence where gradients are asked for, as it would with a bias."""
    if case.direction == "train" and case.sizes["sequence"] % 2:
        return f"jax's cuDNN attention trains on even sequence lengths only, not {case.sizes['sequence']}"
    return cudnn_unsupported(case)


LIBRARY = "triton_side.library.attention"

BLOCK = Block(
    name="attention",
    summary="causal attention, plainly written: scores, mask, softmax, times V",
    inputs=(Tensor("q", AXES), Tensor("k", AXES), Tensor("v", AXES)),
    outputs=(Tensor("out", AXES),),
    reference=reference,
    backward_needs=("q", "k", "v"),
    flops=causal_flops,
    backward_flops=lambda s: 2.5 * causal_flops(s),  # five products against two
    work="flops",
    slices=("batch", "heads"),
    shapes=(
        Shape("llama-8b", sizes(2, 32, 4096, 128), ("bfloat16",), ("quick", "full")),
        Shape("odd-length", sizes(1, 3, 1002, 64), ("float16",), ("quick", "full"), tuned=False),
        Shape("gpt2", sizes(8, 12, 1024, 64), ("bfloat16", "float16")),
        Shape("gpt2-fp32", sizes(8, 12, 1024, 64), ("float32",), ("full",), ("ieee", "tf32")),
        Shape("llama-8b-batch4", sizes(4, 32, 4096, 128), ("bfloat16",)),
        Shape("prime-length", sizes(1, 3, 1009, 64), ("bfloat16",)),
        # With one key the gradients of q and k are exactly zero: there is nothing to hold their errors against.
        Shape("one-token", sizes(1, 32, 1, 128), ("bfloat16",), directions=("fwd",)),
        Shape("odd", sizes(1, 2, 67, 32), ("float32", "float16", "bfloat16"), ("check",)),
        Shape("tiny-token", sizes(2, 1, 1, 16), ("float32", "float16", "bfloat16"), ("check",), directions=("fwd",)),
        Shape("two-tokens", sizes(1, 1, 2, 64), ("float32", "float16", "bfloat16"), ("check",)),
    ),
    implementations=(
        *compilers("attention"),
        Implementation(
            "xla-cudnn", "xlafuse.blocks.attention:apply_cudnn", "xla",
            'jax.nn.dot_product_attention(implementation="cudnn")',
            needs_gpu="cuDNN's attention needs a GPU with cuDNN to build its plan",
            unsupported=jax_cudnn_unsupported,
        ),
        Implementation(
            "sdpa-flash", f"{LIBRARY}:apply_flash", "eager", "F.scaled_dot_product_attention, FlashAttention-2",
            needs_gpu="the CUDA FlashAttention kernels need a GPU",
            unsupported=half_precision_only("FlashAttention-2"),
        ),
        Implementation(
            "sdpa-cudnn", f"{LIBRARY}:apply_cudnn", "eager", "F.scaled_dot_product_attention, cuDNN",
            needs_gpu="cuDNN's attention needs a GPU with cuDNN to build its plan",
            unsupported=cudnn_unsupported,
        ),
        Implementation(
            "flex", f"{LIBRARY}:apply_flex", "flex", "FlexAttention with a causal block mask, compiled",
            needs_gpu="FlexAttention picks its kernel and runs on a GPU",
        ),
        triton("attention"),
        flash_attention_4(), xla_triton("attention"),
    ),
)
