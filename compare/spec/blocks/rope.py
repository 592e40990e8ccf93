"""Rotary position embedding of queries and keys (Su et al., RoFormer, arXiv 2104.09864), in Llama's two halves.

Pair i of a head, x1 = x[i] and x2 = x[i + head_dim/2], turns by the angle position * theta^(-2i/head_dim):

    out = [x1 cos - x2 sin, x2 cos + x1 sin]
"""

from typing import Any

from ..block import Block
from ..case import Shape, Sizes
from ..common_rows import compilers, cuda_graphs, triton
from ..tensor import Tensor


def reference(xp, inputs, *, theta):  # type: ignore[no-untyped-def]
    """Rotate q and k by angles in float32 or wider, because bfloat16 holds no odd position above 256.

    float32 angles err as in any implementation: an angle of 2000 radians by 1e-4.
    """
    q, positions = inputs["q"], inputs["positions"]
    half = q.shape[-1] // 2
    wide = xp.float64 if q.dtype == xp.float64 else xp.float32
    frequencies = theta ** (-xp.arange(half, dtype=wide, device=q.device) / half)
    angles = xp.asarray(positions, dtype=wide)[:, None, :, None] * frequencies
    cos, sin = (xp.asarray(values, dtype=q.dtype) for values in (xp.cos(angles), xp.sin(angles)))

    def rotated(x):  # type: ignore[no-untyped-def]
        x1, x2 = x[..., :half], x[..., half:]
        return xp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1)

    return {"q_out": rotated(q), "k_out": rotated(inputs["k"])}


def draw_positions(generator: Any, sizes: Sizes) -> Any:
    """Draw a first position below 1000 for each sequence, as if a cache held the earlier tokens."""
    return generator.integers(0, 1000, (sizes["batch"], 1)) + list(range(sizes["sequence"]))


def rotation_flops(sizes: Sizes) -> float:
    """Count two products and a sum for each element."""
    heads = sizes["heads"] + sizes["kv_heads"]
    return 3 * sizes["batch"] * heads * sizes["sequence"] * sizes["head_dim"]


def angle_flops(sizes: Sizes) -> float:
    """Count the angle, its cosine and its sine for each pair at each position."""
    return 3 * sizes["batch"] * sizes["sequence"] * sizes["head_dim"] / 2


def sizes(batch: int, heads: int, kv_heads: int, sequence: int, head_dim: int) -> Sizes:
    return {"batch": batch, "heads": heads, "kv_heads": kv_heads, "sequence": sequence, "head_dim": head_dim}


QUERIES = ("batch", "heads", "sequence", "head_dim")
KEYS = ("batch", "kv_heads", "sequence", "head_dim")

BLOCK = Block(
    name="rope",
    summary="rotary position embedding of queries and keys, at given positions",
    inputs=(
        Tensor("q", QUERIES), Tensor("k", KEYS),
        Tensor("positions", ("batch", "sequence"), dtype="int32", draw=draw_positions),
    ),
    outputs=(Tensor("q_out", QUERIES), Tensor("k_out", KEYS)),
    reference=reference,
    attributes={"theta": 500000.0},
    backward_needs=("positions",),
    flops=lambda s: rotation_flops(s) + angle_flops(s),
    backward_flops=rotation_flops,
    slices=("batch",),
    shapes=(
        Shape("llama-8b", sizes(2, 32, 8, 4096, 128), quick=True),
        Shape("odd-length", sizes(1, 5, 1, 1021, 64), ("float32",), edge=True),
        Shape("qwen2-0.5b", sizes(8, 14, 2, 1024, 64), ("float16",)),
        Shape("phi-3-mini", sizes(2, 32, 32, 4096, 96)),
        Shape("one-token", sizes(64, 32, 8, 1, 128)),
        Shape("odd", sizes(2, 3, 1, 37, 10), ("float32", "float16", "bfloat16"), edge=True),
        Shape("tiny-token", sizes(3, 2, 1, 1, 16), ("float32", "float16", "bfloat16"), edge=True),
    ),
    implementations=(*compilers("rope"), triton("rope"), *cuda_graphs("rope")),
)
