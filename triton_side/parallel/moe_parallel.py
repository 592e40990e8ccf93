"""A mixture of SwiGLU experts over ranks: tokens and experts are split, the router is whole.

    y = sum over the chosen experts e of w_e ((silu(x w_gate[e]) * (x w_up[e])) w_down[e])

w is the softmax of the chosen logits; among equal logits the expert with the lowest index wins. Each rank sends the
rows of its tokens to the ranks of their experts, which send the results back. No token is dropped.

inputs: x [tokens, width] and w_gate, w_up [experts, width, hidden], w_down [experts, hidden, width], this rank's
slices; router [experts of all ranks, width]. output: y [tokens, width] of this rank's tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from xlafuse.triton_side.calls.stages import stage
from xlafuse.triton_side.parallel import moe_all_slots, moe_overlapped
from xlafuse.triton_side.parallel.collectives import all_to_all, whole
from xlafuse.triton_side.parallel.ranks import Ranks

ROW_BYTES = 16  # grouped_mm takes rows of a multiple of this


def route(x: Tensor, router: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Return the chosen experts and their weights [tokens, top_k], computed in float32."""
    with stage("router"):
        logits = x.float() @ router.float().T
    with stage("topk"):
        ordered, order = torch.sort(logits, dim=-1, descending=True, stable=True)
        return order[:, :top_k], torch.softmax(ordered[:, :top_k], dim=-1)


def grouped_product(rows: Tensor, weights: Tensor, counts: list[int], ends: Tensor) -> Tensor:
    """Return each expert's rows times its matrix."""
    if any(size * rows.element_size() % ROW_BYTES for size in weights.shape[1:]):
        parts = [part @ weight for part, weight in zip(rows.split(counts), weights, strict=True)]
        return torch.cat(parts)
    return F.grouped_mm(rows, weights, offs=ends)


def eager(inputs: Mapping[str, Tensor], *, ranks: Ranks, top_k: int) -> dict[str, Tensor]:
    x, w_gate, experts = inputs["x"], inputs["w_gate"], len(inputs["w_gate"])
    chosen, weights = route(x, whole(inputs["router"], ranks), top_k)
    with stage("dispatch"):
        by_expert, order = chosen.flatten().sort(stable=True)
        every = torch.arange(experts * ranks.count, device=x.device)
        counts = torch.diff(torch.searchsorted(by_expert, every, right=True), prepend=every.new_zeros(1))
        each = [experts] * ranks.count
        incoming = all_to_all(counts, each, each, ranks)
    # The exchange needs the sizes on the host. torch.compile ends a graph here, which it could not within a stage.
    outgoing_of_expert, incoming_of_expert = torch.stack([counts, incoming]).view(2, ranks.count, experts).tolist()
    with stage("dispatch"):
        sent, received = [sum(rank) for rank in outgoing_of_expert], [sum(rank) for rank in incoming_of_expert]
        rows = all_to_all(x[order // top_k], received, sent, ranks)
        expert = torch.arange(experts, device=x.device).repeat(ranks.count)
        to_expert = torch.repeat_interleave(expert, incoming, output_size=sum(received)).argsort(stable=True)
        rows = rows[to_expert]
        sizes = [sum(of_ranks) for of_ranks in zip(*incoming_of_expert, strict=True)]
        ends = incoming.view(ranks.count, experts).sum(dim=0).cumsum(dim=0).to(torch.int32)
    with stage("gate"):
        gate = grouped_product(rows, w_gate, sizes, ends)
    with stage("up"):
        up = grouped_product(rows, inputs["w_up"], sizes, ends)
    with stage("act"):
        activated = F.silu(gate) * up
    with stage("down"):
        out = grouped_product(activated, inputs["w_down"], sizes, ends)
    with stage("combine"):
        out = torch.empty_like(out).index_copy(0, to_expert, out)
        own = all_to_all(out, sent, received, ranks)
        own = torch.empty_like(own).index_copy(0, order, own).view(*chosen.shape, -1)
        return {"y": (weights[:, :, None] * own.float()).sum(dim=1).to(x.dtype)}


@cache
def _compiled(ranks: Ranks, top_k: int) -> Callable[..., dict[str, Tensor]]:
    # The numbers of rows are constants of a graph; other numbers compile another one.
    return torch.compile(lambda inputs: eager(inputs, ranks=ranks, top_k=top_k), dynamic=False)


def inductor(inputs: Mapping[str, Tensor], *, ranks: Ranks, top_k: int) -> dict[str, Tensor]:
    return _compiled(ranks, top_k)(dict(inputs))


def triton(inputs: Mapping[str, Tensor], *, ranks: Ranks, top_k: int) -> dict[str, Tensor]:
    return {"y": moe_overlapped.moe(inputs, top_k, ranks, put=False)}


def triton_put(inputs: Mapping[str, Tensor], *, ranks: Ranks, top_k: int) -> dict[str, Tensor]:
    return {"y": moe_overlapped.moe(inputs, top_k, ranks, put=True)}


def triton_in_order(inputs: Mapping[str, Tensor], *, ranks: Ranks, top_k: int) -> dict[str, Tensor]:
    """Run the kernels and copies of `triton` one after the other."""
    return {"y": moe_overlapped.moe(inputs, top_k, ranks, put=False, overlap=False)}


def triton_all_slots(inputs: Mapping[str, Tensor], *, ranks: Ranks, top_k: int) -> dict[str, Tensor]:
    """Exchange as many rows as there are slots, whatever the routing is; a CUDA graph can repeat it."""
    return {"y": moe_all_slots.moe(inputs, top_k, ranks)}
