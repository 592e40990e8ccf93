"""A mixture of SwiGLU experts over several GPUs (expert parallel): tokens and experts are split over the ranks.

The formula is that of block `moe`, without its load-balancing loss. A rank sends each of its tokens to the ranks of the
token's experts, and gets their results back.
"""

from __future__ import annotations

import math

from ..block import Block
from ..case import RANKS, Case, Shape, Sizes
from ..common_rows import replayed_ranks, torch_ranks, triton_ranks_all_slots, xla_ragged, xla_ranks
from ..dtype import DTYPES
from ..tensor import Arrays, Tensor
from . import moe


def reference(xp, inputs, *, top_k):  # type: ignore[no-untyped-def]
    return {"y": moe.reference(xp, inputs, top_k=top_k)["y"]}


def least_sent(case: Case, rank: int, inputs: Arrays) -> int:
    """Return the bytes of the rows that the routing sends to other ranks, and of as many results that come back.

    This rank sends results for the rows that it receives; over all ranks, both sums are the same. A token whose experts
    are on one other rank is counted once for each. Backward sends the gradients of both, and sums the router's.
    """
    import numpy as np

    experts, itemsize = case.sizes["experts"], DTYPES[case.dtype].itemsize
    logits = inputs["x"] @ inputs["router"].T
    chosen = np.argsort(-logits, axis=1, kind="stable")[:, : case.sizes["top_k"]]
    leaving = int((chosen // (experts // case.ranks) != rank).sum())
    row = case.sizes["width"] * itemsize
    if not case.differentiates:
        return 2 * leaving * row
    return 4 * leaving * row + math.ceil(2 * (case.ranks - 1) / case.ranks * experts * row)


def sizes(
    tokens: int, width: int, hidden: int, experts: int, top_k: int, used: int | None = None, ranks: int = 2
) -> Sizes:
    """tokens, experts: over all ranks. used: the number of experts that get tokens, all by default."""
    return {**moe.sizes(tokens, width, hidden, experts, top_k, used), RANKS: ranks}


def working_bytes(sizes: Sizes) -> int:
    """Return a rank's memory of XLA's grouped products, for twice as many rows as come when all ranks get the same."""
    local = {**sizes, "experts": sizes["experts"] // sizes[RANKS]}
    return moe.working_bytes(local)


ALL_SLOTS = triton_ranks_all_slots("moe_parallel")
SPLIT = "experts"
UP, DOWN = ("experts", "width", "hidden"), ("experts", "hidden", "width")
BLOCK = Block(
    name="moe_parallel",
    summary="mixture of SwiGLU experts over several GPUs: router, all-to-all, grouped products, all-to-all",
    inputs=(
        Tensor("x", ("tokens", "width"), draw=moe.draw_x, split="tokens"),
        Tensor("router", ("experts", "width"), draw=lambda generator, sizes: moe.router_weight(sizes)),
        Tensor("w_gate", UP, fan_in="width", read=moe.used_weights, split=SPLIT),
        Tensor("w_up", UP, fan_in="width", read=moe.used_weights, split=SPLIT),
        Tensor("w_down", DOWN, fan_in="hidden", read=moe.used_weights, split=SPLIT),
    ),
    outputs=(Tensor("y", ("tokens", "width"), split="tokens"),),
    reference=reference,
    parameters=("top_k",),
    directions=("fwd", "joint"),
    flops=moe.product_flops,
    backward_flops=lambda s: 2 * moe.product_flops(s),
    work="flops",
    working_bytes=working_bytes,
    least_sent=least_sent,
    sizes=sizes,
    shapes=(
        # Mixtral's width, experts and choices with a seventh of its hidden size: the float64 gradients of its weights
        # would take 11 GB.
        Shape("mixtral-thin", sizes(16384, 4096, 2048, 8, 2), quick=True),
        Shape("odd", sizes(34, 37, 29, 6, 2, used=4), ("float32", "bfloat16"), edge=True),
        # Forward only: the weight of a single choice is 1, so the router's gradient is exactly zero.
        Shape("all-on-one", sizes(32, 16, 24, 4, 1, used=1), ("float32", "bfloat16"), directions=("fwd",), edge=True),
        Shape("one-token", sizes(2, 16, 24, 4, 2, used=3), ("float32", "bfloat16"), edge=True),
    ),
    implementations=(
        *xla_ranks("moe_parallel", partitioned=False),
        xla_ragged("moe_parallel"),
        *torch_ranks("moe_parallel", async_tensor_parallel=False, routed=True),
        ALL_SLOTS,
        replayed_ranks(ALL_SLOTS),
    ),
)
