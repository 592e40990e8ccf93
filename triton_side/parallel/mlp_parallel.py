"""A SwiGLU MLP over ranks: x is split by tokens, the weights by hidden size.

    y = (silu(x w_gate) * (x w_up)) w_down

Each rank gathers the tokens of all ranks, computes with its share of the hidden axis, and gets its tokens' sums over
the ranks. inputs: x [tokens, width], w_gate, w_up [width, hidden], w_down [hidden, width], this rank's slices;
output: y [tokens, width] of this rank's tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from xlafuse.triton_side.calls.stages import stage
from xlafuse.triton_side.parallel import mlp_overlapped, symmetric_memory
from xlafuse.triton_side.parallel.collectives import all_gather, reduce_scatter
from xlafuse.triton_side.parallel.ranks import Ranks


def eager(inputs: Mapping[str, Tensor], *, ranks: Ranks) -> dict[str, Tensor]:
    with stage("gather"):
        x = all_gather(inputs["x"], ranks)
    with stage("gate"):
        gate = x @ inputs["w_gate"]
    with stage("up"):
        up = x @ inputs["w_up"]
    with stage("act"):
        activated = F.silu(gate) * up
    with stage("down"):
        partial = activated @ inputs["w_down"]
    with stage("scatter"):
        return {"y": reduce_scatter(partial, ranks)}


@cache
def _compiled(ranks: Ranks, function: Callable[..., dict[str, Tensor]]) -> Callable[..., dict[str, Tensor]]:
    return torch.compile(lambda inputs: function(inputs, ranks=ranks), dynamic=False)


def inductor(inputs: Mapping[str, Tensor], *, ranks: Ranks) -> dict[str, Tensor]:
    return _compiled(ranks, eager)(dict(inputs))


def fused(inputs: Mapping[str, Tensor], *, ranks: Ranks) -> dict[str, Tensor]:
    """Run each product and its exchange as one operation, which overlaps both through symmetric memory."""
    group = symmetric_memory.name_of(ranks.group)
    gate, up = symmetric_memory.gather_products(inputs["x"], inputs["w_gate"], inputs["w_up"], group)
    return {"y": symmetric_memory.product_scatter(F.silu(gate) * up, inputs["w_down"], group)}


def inductor_async(inputs: Mapping[str, Tensor], *, ranks: Ranks) -> dict[str, Tensor]:
    if not ranks.communicate:  # the same products without an exchange
        return inductor(inputs, ranks=ranks)
    return _compiled(ranks, fused)(dict(inputs))


def triton(inputs: Mapping[str, Tensor], *, ranks: Ranks) -> dict[str, Tensor]:
    return {"y": mlp_overlapped.mlp(inputs, ranks, put=False)}


def triton_put(inputs: Mapping[str, Tensor], *, ranks: Ranks) -> dict[str, Tensor]:
    return {"y": mlp_overlapped.mlp(inputs, ranks, put=True)}


def triton_in_order(inputs: Mapping[str, Tensor], *, ranks: Ranks) -> dict[str, Tensor]:
    """Run the kernels and copies of `triton` one after the other."""
    return {"y": mlp_overlapped.mlp(inputs, ranks, put=False, overlap=False)}
