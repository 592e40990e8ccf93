"""Llama's MLP with its norm and residual: y = x + (silu(h @ gate_weight) * (h @ up_weight)) @ down_weight.

h = rmsnorm(x, norm_weight) and silu(z) = z * sigmoid(z). Source: Shazeer, "GLU Variants Improve Transformer",
https://arxiv.org/abs/2002.05202.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from xlafuse.triton_side.calls.stages import stage


def apply(inputs: Mapping[str, Tensor], *, eps: float) -> dict[str, Tensor]:
    """x [tokens, width], norm_weight [width], gate_weight and up_weight [width, hidden], down_weight
    [hidden, width] -> y [tokens, width].

    The norm is computed in float32 and cast to x's dtype before it is multiplied by its weight; everything else is in
    x's dtype. float32 products follow `torch.get_float32_matmul_precision()`.
    """
    x = inputs["x"]
    with stage("norm"):
        x_fp32 = x.float()
        square_mean = (x_fp32 * x_fp32).mean(dim=-1, keepdim=True)
        h = (x_fp32 * torch.rsqrt(square_mean + eps)).to(x.dtype) * inputs["norm_weight"]
    with stage("gate"):
        gate = h @ inputs["gate_weight"]
    with stage("up"):
        up = h @ inputs["up_weight"]
    with stage("act"):
        activated = gate * torch.sigmoid(gate) * up
    with stage("down"):
        down = activated @ inputs["down_weight"]
    with stage("residual"):
        y = x + down
    return {"y": y}
