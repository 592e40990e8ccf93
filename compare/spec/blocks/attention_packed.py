"""Causal attention of sequences of uneven length, packed one after the other in one tensor without padding.

Sequence i has the tokens cu_seqlens[i] .. cu_seqlens[i + 1]. A token sees the tokens of its own sequence up to its own
position. Heads of k and v are shared as in `attention`.
"""

import itertools
import math

from ..block import Block
from ..case import Case, Shape, Sizes
from ..common_rows import (
    compilers,
    cuda_graphs,
    flash_attention_4,
    flex_in_tf32,
    half_precision_only,
    triton,
    xla_tf32x3,
)
from ..implementation import Implementation
from ..tensor import Tensor
from . import attention


def reference(xp, inputs, longest):  # type: ignore[no-untyped-def]
    q, k, v, cu_seqlens = (inputs[name] for name in ("q", "k", "v", "cu_seqlens"))
    tokens, heads, head_dim = q.shape
    kv_heads = k.shape[1]
    position = xp.cumsum(xp.ones_like(q[:, 0, 0], dtype=xp.int64), 0) - 1
    sequence = xp.sum(cu_seqlens[None, 1:] <= position[:, None], axis=1)
    seen = (sequence[:, None] == sequence[None, :]) & (position[:, None] >= position[None, :])
    q = xp.moveaxis(q.reshape(tokens, kv_heads, heads // kv_heads, head_dim), 0, 2)
    k, v = (xp.moveaxis(x, 0, 1)[:, None] for x in (k, v))
    scores = xp.where(seen, q @ k.mT / math.sqrt(head_dim), -math.inf)
    exponentials = xp.exp(scores - xp.amax(scores, axis=-1, keepdims=True))
    out = exponentials / xp.sum(exponentials, axis=-1, keepdims=True) @ v
    return {"out": xp.moveaxis(out, 2, 0).reshape(tokens, heads, head_dim)}


def lengths(tokens: int, sequences: int) -> list[int]:
    """Return the lengths of at least two sequences: 1 token, then growing as 2, 3, 4, ...; the last takes the rest."""
    total = sequences * (sequences + 1) // 2
    growing = [1, *(tokens * (i + 1) // total for i in range(1, sequences - 1))]
    return [*growing, tokens - sum(growing)]


def draw_cu_seqlens(generator, sizes):  # type: ignore[no-untyped-def]
    """Return the boundaries of the lengths in random order."""
    shuffled = generator.permutation(lengths(sizes["tokens"], sizes["sequences"]))
    return [0, *itertools.accumulate(map(int, shuffled))]


def flops(sizes: Sizes) -> float:
    """Count two products of head_dim for each pair of tokens of a sequence; the causal half of the square counts."""
    pairs = sum(length * length / 2 for length in lengths(sizes["tokens"], sizes["sequences"]))
    return 2 * 2 * sizes["heads"] * pairs * sizes["head_dim"]


def sizes(tokens: int, sequences: int, heads: int, kv_heads: int, head_dim: int) -> Sizes:
    return {
        "tokens": tokens, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "sequences": sequences,
        "boundaries": sequences + 1, "longest": max(lengths(tokens, sequences)),
    }


def flex_unsupported(case: Case) -> str | None:
    """Refuse short sequences that FlexAttention's decoding kernel cannot tile.

    Fewer than 128 queries go to that kernel when a power of two of heads shares keys. Its tile holds all queries of
    such a group, rounded up to a power of two. A tile that does not divide the mask's blocks of 128 has no
    configuration, and compiling ends in NoValidChoicesError (torch 2.11.0 and 2.13.0, forward and training;
    test_deviceless.py).
    """
    tokens, group = case.sizes["tokens"], case.sizes["heads"] // case.sizes["kv_heads"]
    if tokens >= 128 or group & (group - 1) or tokens * group <= 128:
        return flex_in_tf32(case)
    return f"FlexAttention's decoding kernel takes no {tokens} queries of {group} heads that share keys: over 128"


def jax_cudnn_unsupported(case: Case) -> str | None:
    """Refuse odd sequences in training: jax 0.10.2 and 0.11.2 do so under a bias, and the mask is one."""
    tokens = case.sizes["tokens"]
    if case.direction == "train" and tokens % 2:
        return f"jax's cuDNN attention trains under a mask on even numbers of tokens only, not {tokens}"
    return half_precision_only("cuDNN attention")(case)


LIBRARY = "xlafuse.triton_side.library.attention_packed"
Q_AXES = ("tokens", "heads", "head_dim")
KV_AXES = ("tokens", "kv_heads", "head_dim")

BLOCK = Block(
    name="attention_packed",
    summary="causal attention of packed sequences of uneven length, shared heads of K and V",
    inputs=(
        Tensor("q", Q_AXES), Tensor("k", KV_AXES), Tensor("v", KV_AXES),
        Tensor("cu_seqlens", ("boundaries",), dtype="int32", draw=draw_cu_seqlens),
    ),
    outputs=(Tensor("out", Q_AXES),),
    reference=reference,
    parameters=("longest",),
    backward_needs=("q", "k", "v", "cu_seqlens"),
    flops=flops,
    backward_flops=lambda s: 2.5 * flops(s),  # five products against two
    work="flops",
    slices=(("kv_heads", "heads"),),
    working_bytes=lambda s: attention.BYTES_A_SCORE * s["heads"] * s["tokens"] ** 2,
    sizes=sizes,
    shapes=(
        Shape("llama-3-8b-4k", sizes(4096, 12, 32, 8, 128), quick=True),
        Shape("odd-length", sizes(1002, 7, 3, 1, 64), ("float16",), edge=True),
        Shape("llama-3-8b-8k", sizes(8192, 16, 32, 8, 128)),
        Shape("gpt2-fp32", sizes(2048, 9, 12, 12, 64), ("float32",), ("ieee", "tf32")),
        Shape("odd", sizes(67, 5, 4, 2, 16), ("float32", "float16", "bfloat16"), edge=True),
        # In float16, and even, so that flex and training by cuDNN in JAX take it.
        Shape("even", sizes(64, 5, 4, 2, 16), ("float16",), edge=True),
        Shape("lone-tokens", sizes(5, 3, 2, 1, 32), ("float32",), edge=True),
        # Forward only: with one token each the gradients of q and k are exactly zero, so errors have no scale.
        Shape("tiny-tokens", sizes(3, 3, 2, 1, 16), ("float32", "bfloat16"), directions=("fwd",), edge=True),
    ),
    implementations=(
        *compilers("attention_packed"), xla_tf32x3("attention_packed"),
        Implementation(
            "xla-cudnn", "xlafuse.blocks.attention_packed:apply_cudnn", "xla",
            'jax.nn.dot_product_attention(mask=..., implementation="cudnn") of all tokens as one sequence',
            needs_gpu="cuDNN's attention needs a GPU with cuDNN to build its plan",
            unsupported=jax_cudnn_unsupported,
        ),
        Implementation(
            "varlen", f"{LIBRARY}:apply_varlen", "eager", "torch.nn.attention.varlen, FlashAttention-2",
            needs_gpu="the CUDA FlashAttention kernels need a GPU",
            unsupported=half_precision_only("FlashAttention-2"),
        ),
        Implementation(
            "flex", f"{LIBRARY}:apply_flex", "flex", "FlexAttention with a document mask, compiled",
            needs_gpu="FlexAttention picks its kernel and runs on a GPU",
            unsupported=flex_unsupported,
        ),
        triton("attention_packed"), flash_attention_4("apply_packed"),
        *cuda_graphs("attention_packed"),
    ),
)
