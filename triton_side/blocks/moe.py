"""A mixture of SwiGLU experts. A router sends each token to the top_k experts with the highest scores (Mixtral).

    y = sum over the chosen experts e of w_e ((silu(x w_gate[e]) * (x w_up[e])) w_down[e])
    balance_loss = experts * sum over all experts e of fraction_e mean_e

w is the softmax of the chosen logits, which equals the full softmax renormalised over the chosen experts
(arXiv:2401.04088). No token is dropped. fraction_e is the share of the choices that fall on e, and mean_e the mean of
e's probabilities (arXiv:2101.03961).
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from xlafuse.triton_side.calls.stages import stage


def route(x: Tensor, router: Tensor, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return (experts [tokens, top_k], their weights [tokens, top_k], balance_loss []), computed in float32.

    Among equal logits the lowest index is first. torch.topk does not guarantee that; a stable sort does.
    """
    experts = len(router)
    with stage("router"):
        logits = x.float() @ router.float().T
    with stage("topk"):
        ordered, order = torch.sort(logits, dim=-1, descending=True, stable=True)
        chosen = order[:, :top_k]
        weights = torch.softmax(ordered[:, :top_k], dim=-1)
    with stage("balance"):
        probabilities = torch.softmax(logits, dim=-1)
        counts = (chosen[:, :, None] == torch.arange(experts, device=x.device)).sum(dim=(0, 1))
        balance_loss = experts * (counts / chosen.numel() * probabilities.mean(dim=0)).sum()
    return chosen, weights, balance_loss


def apply(inputs: Mapping[str, Tensor], *, top_k: int) -> dict[str, Tensor]:
    """x [tokens, width], router [experts, width], w_gate, w_up [experts, width, hidden], w_down [experts, hidden,
    width] -> y [tokens, width] in x's dtype, balance_loss [] in float32.

    Every expert computes every token; experts that a token did not choose have weight zero. Only this plain form has
    shapes that do not depend on data, as `torch.compile(fullgraph=True)` requires. It computes experts / top_k times as
    many products as needed; `xlafuse.triton_side.library.moe` has the grouped form.
    """
    x, router = inputs["x"], inputs["router"]
    chosen, chosen_weights, balance_loss = route(x, router, top_k)
    with stage("dispatch"):
        weights = chosen_weights.new_zeros(len(x), len(router)).scatter(1, chosen, chosen_weights)
    with stage("gate"):
        gate = x @ inputs["w_gate"]  # [experts, tokens, hidden]
    with stage("up"):
        up = x @ inputs["w_up"]
    with stage("act"):
        activated = gate * torch.sigmoid(gate) * up
    with stage("down"):
        out = activated @ inputs["w_down"]
    with stage("combine"):
        y = (weights.T[:, :, None] * out.float()).sum(dim=0).to(x.dtype)
    return {"y": y, "balance_loss": balance_loss}
