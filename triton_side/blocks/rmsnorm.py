"""RMSNorm: y = (x * rsqrt(mean(x^2) + eps)) * weight, the mean over the last axis.

Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", https://arxiv.org/abs/1910.07467. The cast is where
Llama has it.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from xlafuse.triton_side.calls.stages import stage


def apply(inputs: Mapping[str, Tensor], *, eps: float) -> dict[str, Tensor]:
    """x [rows, columns], weight [columns] -> y [rows, columns].

    x is normalised in float32, cast to its dtype, then multiplied by the weight in that dtype.
    """
    x, weight = inputs["x"], inputs["weight"]
    with stage("mean_square"):
        x_fp32 = x.float()
        square_mean = (x_fp32 * x_fp32).mean(dim=-1, keepdim=True)
    with stage("normalize"):
        normalized = (x_fp32 * torch.rsqrt(square_mean + eps)).to(x.dtype)
    with stage("weight"):
        y = normalized * weight
    return {"y": y}
