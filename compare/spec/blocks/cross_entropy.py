"""Mean cross-entropy of logits with label smoothing (arXiv 1512.00567), ignored labels and z-loss (arXiv 2204.02311).

A counted token's loss is (1 - s) (lse - logit[label]) + s (lse - mean(logits)) + z lse^2, in float32, with
lse = logsumexp(logits). The result is the mean over counted tokens, and 0 without any.
"""

from typing import Any

from ..block import Block
from ..case import Case, Shape, Sizes
from ..common_rows import compilers, cuda_graphs, library, triton
from ..tensor import Tensor
from ._portable import at_least_float32

IGNORED = -100


def reference(xp, inputs, *, smoothing, z_loss):  # type: ignore[no-untyped-def]
    logits, labels = at_least_float32(xp, inputs["logits"]), inputs["labels"]
    counted = labels != IGNORED
    maximum = xp.amax(logits, axis=-1)
    lse = maximum + xp.log(xp.sum(xp.exp(logits - maximum[:, None]), axis=-1))
    chosen = logits[xp.arange(len(labels)), xp.where(counted, labels, 0)]
    uniform = xp.mean(logits, axis=-1)
    losses = (1 - smoothing) * (lse - chosen) + smoothing * (lse - uniform) + z_loss * lse * lse
    return {"loss": xp.sum(xp.where(counted, losses, 0.0)) / xp.clip(xp.sum(counted), 1, None)}


def ignored(sizes: Sizes) -> int:
    return sizes["tokens"] * sizes["ignored_percent"] // 100


def draw_labels(generator: Any, sizes: Sizes) -> Any:
    """Draw any class for each token, and ignore the given share at random positions."""
    labels = generator.integers(0, sizes["classes"], sizes["tokens"])
    labels[generator.permutation(sizes["tokens"])[: ignored(sizes)]] = IGNORED
    return labels


def counted_logits(sizes: Sizes) -> int:
    """Count the logits of counted tokens. Graphs declare all logits, because only the GPU knows the labels."""
    return (sizes["tokens"] - ignored(sizes)) * sizes["classes"]


def sizes(tokens: int, classes: int, ignored_percent: int) -> Sizes:
    return {"tokens": tokens, "classes": classes, "ignored_percent": ignored_percent}


def _vocabulary_in_float32(case: Case) -> str | None:
    """Return why F.cross_entropy is not compared: of gpt2 in float32, d_logits erred 7.2e-4 on an H200 (torch 2.11.0),
    where plain code errs 1.4e-4."""
    if case.differentiates and case.dtype == "float32" and case.sizes["classes"] >= 50257:
        return "F.cross_entropy's gradient of 50,257 logits in float32 errs by 5 times plain code's error"
    return None


BLOCK = Block(
    name="cross_entropy",
    summary="mean cross-entropy with label smoothing, ignored labels and z-loss",
    inputs=(
        # With this spread a few classes hold most of a token's probability, as in a trained model.
        Tensor("logits", ("tokens", "classes"), std=4.0, read=counted_logits, magnified=True),
        Tensor("labels", ("tokens",), dtype="int32", draw=draw_labels),
    ),
    outputs=(Tensor("loss", (), dtype="float32"),),
    reference=reference,
    attributes={"smoothing": 0.1, "z_loss": 1e-4},
    backward_needs=("logits", "labels"),
    directions=("fwd", "train", "joint"),
    flops=lambda s: 5 * s["tokens"] * s["classes"],
    backward_flops=lambda s: 5 * s["tokens"] * s["classes"],
    autotuned_in_quick=("fwd",),
    shapes=(
        # The float64 gradient takes 2.1 GB; 8192 tokens would take four times as much.
        Shape("llama-3", sizes(2048, 128256, 5), quick=True),
        Shape("prime", sizes(1021, 4093, 5), ("float32",), edge=True),
        Shape("gpt2", sizes(2048, 50257, 5), ("float16", "float32"), directions=("fwd", "train"), quick=True),
        Shape("32k", sizes(8192, 32000, 5)),
        Shape("all-ignored", sizes(5, 67, 100), ("float32", "float16"), edge=True),
        Shape("odd", sizes(7, 257, 30), ("float32", "float16", "bfloat16"), edge=True),
        Shape("tiny-all-ignored", sizes(3, 19, 100), ("bfloat16",), directions=("train",), edge=True),
        Shape("tiny-row", sizes(1, 67, 0), ("float32", "bfloat16"), directions=("train",), edge=True),
        Shape("tiny-column", sizes(3, 1, 0), ("float32", "bfloat16"), directions=("train",), edge=True),
        # In bfloat16 and float32 near the square root of the largest number, because z-loss squares it.
        Shape(
            "large-fp16", {**sizes(3, 67, 30), "magnitude": 3000}, ("float16",), directions=("train",), edge=True,
        ),
        Shape(
            "large", {**sizes(3, 67, 30), "magnitude": 5 * 10**17}, ("float32", "bfloat16"),
            directions=("train",), edge=True,
        ),
        Shape(
            "transposed", sizes(7, 67, 30), ("float32", "bfloat16"),
            directions=("train",), layout="transposed", edge=True,
        ),
    ),
    implementations=(
        *compilers("cross_entropy"), library("cross_entropy", "F.cross_entropy, plus z-loss", _vocabulary_in_float32),
        triton("cross_entropy"),
        *cuda_graphs("cross_entropy"),
    ),
)
