"""out = softmax(q k^T / sqrt(head_dim) + bias) v, with a bias for each head and pair of positions.

The batch shares the bias, as with T5's relative positions (arXiv 1910.10683; T5 leaves out the scale). A bias of -inf
hides a key from a query. A query that sees no key has an output of zeros and no gradient.
"""

import math
from typing import Any

from ..block import Block
from ..case import Case, Shape, Sizes
from ..common_rows import compilers, cuda_graphs, flex_in_tf32, triton, xla_tf32x3
from ..implementation import Implementation
from ..tensor import Tensor
from . import attention


def reference(xp, inputs):  # type: ignore[no-untyped-def]
    q, k, v = inputs["q"], inputs["k"], inputs["v"]
    scores = q @ k.mT / math.sqrt(q.shape[-1]) + inputs["bias"]
    largest = xp.amax(scores, axis=-1, keepdims=True)
    exponentials = xp.exp(scores - xp.where(largest > -math.inf, largest, 0.0))
    total = xp.sum(exponentials, axis=-1, keepdims=True)
    return {"out": exponentials / xp.where(total > 0, total, 1.0) @ v}


def draw_bias(generator: Any, sizes: Sizes) -> Any:
    """Draw normal values; with `hidden`, every `hidden`-th pair and each head's whole middle query are -inf."""
    heads, sequence, hidden = sizes["heads"], sizes["sequence"], sizes["hidden"]
    bias = generator.standard_normal((heads, sequence, sequence), dtype="float32")
    if hidden:
        bias.reshape(-1)[::hidden] = -math.inf
        bias[:, sequence // 2] = -math.inf
    return bias


def flops(sizes: Sizes) -> float:
    """Count two products of head_dim for each pair of query and key."""
    return 2 * 2 * sizes["batch"] * sizes["heads"] * sizes["sequence"] ** 2 * sizes["head_dim"]


def sizes(batch: int, heads: int, sequence: int, head_dim: int, hidden: int = 0) -> Sizes:
    return {"batch": batch, "heads": heads, "sequence": sequence, "head_dim": head_dim, "hidden": hidden}


def jax_cudnn_unsupported(case: Case) -> str | None:
    if case.direction == "train" and case.sizes["sequence"] % 2:
        return f"jax's cuDNN attention trains on even sequence lengths only, not {case.sizes['sequence']}"
    return attention.cudnn_unsupported(case)


def sdpa_cudnn_unsupported(case: Case) -> str | None:
    if case.differentiates:
        return "F.scaled_dot_product_attention gives no gradient of a mask by cuDNN"
    return attention.cudnn_unsupported(case)


LIBRARY = "xlafuse.triton_side.library.attention_bias"
NEEDS_CUDNN = "cuDNN's attention needs a GPU with cuDNN to build its plan"
AXES = ("batch", "heads", "sequence", "head_dim")

BLOCK = Block(
    name="attention_bias",
    summary="attention with a learnt bias for each head and pair of positions, as in T5; its gradient sums the batch",
    inputs=(
        Tensor("q", AXES), Tensor("k", AXES), Tensor("v", AXES),
        Tensor("bias", ("heads", "sequence", "sequence"), draw=draw_bias),
    ),
    outputs=(Tensor("out", AXES),),
    reference=reference,
    backward_needs=("q", "k", "v", "bias"),
    flops=flops,
    backward_flops=lambda s: 2.5 * flops(s),  # five products against two
    work="flops",
    slices=("batch", "heads"),
    working_bytes=attention.working_bytes,
    shapes=(
        Shape("t5-large", sizes(4, 16, 1024, 64), quick=True),
        Shape("odd-length", sizes(2, 3, 1002, 64), ("float16",), edge=True),
        Shape("t5-large-2k", sizes(4, 16, 2048, 64)),
        Shape("t5-large-fp32", sizes(2, 16, 1024, 64), ("float32",), ("ieee", "tf32")),
        Shape("odd", sizes(2, 2, 67, 32), ("float32", "float16", "bfloat16"), edge=True),
        Shape("odd-hidden", sizes(2, 2, 37, 16, hidden=3), ("float32", "float16"), edge=True),
        # Forward only: with one key the gradients of q, k and bias are exactly zero, and a relative error has no scale.
        Shape("tiny-token", sizes(2, 1, 1, 16), ("float32", "bfloat16"), directions=("fwd",), edge=True),
    ),
    implementations=(
        *compilers("attention_bias"), xla_tf32x3("attention_bias"),
        Implementation(
            "xla-cudnn", "xlafuse.blocks.attention_bias:apply_cudnn", "xla",
            'jax.nn.dot_product_attention(bias=..., implementation="cudnn")',
            needs_gpu=NEEDS_CUDNN,
            unsupported=jax_cudnn_unsupported,
        ),
        Implementation(
            "sdpa-efficient", f"{LIBRARY}:apply_efficient", "eager",
            "F.scaled_dot_product_attention with a mask, the memory-efficient kernels",
            needs_gpu="the CUDA memory-efficient kernels need a GPU",
        ),
        Implementation(
            "sdpa-cudnn", f"{LIBRARY}:apply_cudnn", "eager", "F.scaled_dot_product_attention with a mask, cuDNN",
            needs_gpu=NEEDS_CUDNN,
            unsupported=sdpa_cudnn_unsupported,
        ),
        Implementation(
            "flex", f"{LIBRARY}:apply_flex", "flex", "FlexAttention, its scores modified by the bias, compiled",
            needs_gpu="FlexAttention picks its kernel and runs on a GPU",
            unsupported=flex_in_tf32,
        ),
        triton("attention_bias"),
        *cuda_graphs("attention_bias"),
    ),
)
