"""y = (silu(x Wg) * (x Wu)) Wd over several GPUs (tensor parallel): x is split by tokens, the weights by hidden size.

Each rank gathers the tokens of all, computes its share of the hidden axis, and sums its tokens' results over the ranks.
"""

from ..block import Block
from ..case import RANKS, Case, Shape, Sizes
from ..common_rows import torch_ranks, xla_ranks
from ..dtype import DTYPES
from ..tensor import Arrays, Tensor


def reference(xp, inputs):  # type: ignore[no-untyped-def]
    x = inputs["x"]
    gate = x @ inputs["w_gate"]
    activated = gate / (1 + xp.exp(-gate)) * (x @ inputs["w_up"])
    return {"y": activated @ inputs["w_down"]}


def product_flops(sizes: Sizes) -> float:
    """Count three products of tokens x width x hidden, over all ranks."""
    return 3 * 2 * sizes["tokens"] * sizes["width"] * sizes["hidden"]


def least_sent(case: Case, rank: int, inputs: Arrays) -> int:
    """Return the bytes of this rank's rows for every other rank, and of its sums for them; backward does the same."""
    exchanged = case.sizes["tokens"] // case.ranks * case.sizes["width"] * DTYPES[case.dtype].itemsize
    return (4 if case.differentiates else 2) * (case.ranks - 1) * exchanged


def sizes(tokens: int, width: int, hidden: int, ranks: int = 2) -> Sizes:
    """tokens, hidden: over all ranks."""
    return {"tokens": tokens, "width": width, "hidden": hidden, RANKS: ranks}


BLOCK = Block(
    name="mlp_parallel",
    summary="SwiGLU MLP over several GPUs: all-gather of tokens, products, reduce-scatter",
    inputs=(
        Tensor("x", ("tokens", "width"), split="tokens"),
        Tensor("w_gate", ("width", "hidden"), fan_in="width", split="hidden"),
        Tensor("w_up", ("width", "hidden"), fan_in="width", split="hidden"),
        Tensor("w_down", ("hidden", "width"), fan_in="hidden", split="hidden"),
    ),
    outputs=(Tensor("y", ("tokens", "width"), split="tokens"),),
    reference=reference,
    directions=("fwd", "joint"),
    flops=product_flops,
    backward_flops=lambda s: 2 * product_flops(s),
    work="flops",
    least_sent=least_sent,
    sizes=sizes,
    shapes=(
        Shape("llama-8b", sizes(16384, 4096, 14336), quick=True),
        Shape("odd", sizes(34, 37, 58), ("float32", "bfloat16"), edge=True),
        Shape("one-token", sizes(2, 16, 32), ("float32", "bfloat16"), edge=True),
    ),
    implementations=(
        *xla_ranks("mlp_parallel"),
        *torch_ranks("mlp_parallel"),
    ),
)
