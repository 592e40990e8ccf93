"""The last projection and its loss: the mean cross-entropy (block `cross_entropy`) of h w^T.

The plain implementations round the logits to the case's dtype, as a linear layer does, and compute the loss from them
in float32. A compiler that fuses the two may keep float32 logits, which is also right.
"""

from ..block import Block
from ..case import Shape, Sizes
from ..common_rows import compilers, library, liger, triton
from ..implementation import Implementation
from ..tensor import Tensor
from . import cross_entropy
from .cross_entropy import draw_labels


def reference(xp, inputs, *, smoothing, z_loss):  # type: ignore[no-untyped-def]
    given = {"logits": inputs["h"] @ inputs["w"].T, "labels": inputs["labels"]}
    return cross_entropy.reference(xp, given, smoothing=smoothing, z_loss=z_loss)


def product_flops(sizes: Sizes) -> float:
    return 2 * sizes["tokens"] * sizes["width"] * sizes["classes"]


def loss_flops(sizes: Sizes) -> float:
    return 5 * sizes["tokens"] * sizes["classes"]


def sizes(tokens: int, width: int, classes: int, ignored_percent: int) -> Sizes:
    return {"tokens": tokens, "width": width, "classes": classes, "ignored_percent": ignored_percent}


BLOCK = Block(
    name="linear_cross_entropy",
    summary="last projection and mean cross-entropy; the logits need not be in memory",
    inputs=(
        # Logits with the spread of `cross_entropy`.
        Tensor("h", ("tokens", "width"), std=4.0),
        Tensor("w", ("classes", "width"), fan_in="width"),
        Tensor("labels", ("tokens",), dtype="int32", draw=draw_labels),
    ),
    outputs=(Tensor("loss", (), dtype="float32"),),
    reference=reference,
    attributes={"smoothing": 0.1, "z_loss": 1e-4},
    # No train: its two phases would save the logits, or equal these directions.
    directions=("fwd", "joint"),
    flops=lambda s: product_flops(s) + loss_flops(s),
    backward_flops=lambda s: 2 * product_flops(s) + loss_flops(s),
    work="flops",
    shapes=(
        # In float64 the gradient of w takes 4.2 GB, and a tensor of logits 2.1 GB (8.4 GB for 8192 tokens).
        Shape("llama-3", sizes(2048, 4096, 128256, 5), quick=True),
        Shape("llama-3-8k", sizes(8192, 4096, 128256, 5)),
        Shape("prime", sizes(1021, 509, 4093, 5), ("float32",), edge=True),
        Shape("all-ignored", sizes(5, 24, 67, 100), ("float32", "float16"), edge=True),
        Shape("odd", sizes(7, 37, 257, 30), ("float32", "float16", "bfloat16"), edge=True),
        Shape("tiny-all-ignored", sizes(3, 16, 19, 100), ("bfloat16",), directions=("joint",), edge=True),
        Shape("tiny-row", sizes(1, 16, 67, 0), ("float32", "bfloat16"), directions=("joint",), edge=True),
        Shape("tiny-column", sizes(3, 1, 1, 0), ("float32", "bfloat16"), directions=("joint",), edge=True),
    ),
    implementations=(
        *compilers("linear_cross_entropy", train=False),
        Implementation(
            "xla-chunked", "xlafuse.blocks.linear_cross_entropy:apply_in_chunks", "xla",
            "jax.jit of a jax.lax.map over chunks of classes under jax.checkpoint",
        ),
        library("linear_cross_entropy", "F.cross_entropy of chunks of tokens under torch.utils.checkpoint"),
        triton("linear_cross_entropy"),
        liger("linear_cross_entropy", needs_gpu="Liger's code reads a label count of the GPU on the host"),
    ),
)
