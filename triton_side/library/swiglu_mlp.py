"""Llama's MLP from library calls: `F.rms_norm`, three GEMMs, `F.silu`, the residual through `torch.addmm`."""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor


def apply(inputs: Mapping[str, Tensor], *, eps: float) -> dict[str, Tensor]:
    """y = x + (silu(h @ gate_weight) * (h @ up_weight)) @ down_weight with h = rmsnorm(x, norm_weight).

    x [tokens, width], norm_weight [width], gate_weight and up_weight [width, hidden], down_weight [hidden,
    width] -> y [tokens, width]. float32 products follow `torch.get_float32_matmul_precision()`. addmm adds the residual
    inside the last GEMM's library call, before rounding.
    """
    x, norm_weight = inputs["x"], inputs["norm_weight"]
    h = F.rms_norm(x, norm_weight.shape, norm_weight, eps)
    activated = F.silu(h @ inputs["gate_weight"]) * (h @ inputs["up_weight"])
    return {"y": torch.addmm(x, activated, inputs["down_weight"])}
