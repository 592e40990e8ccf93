"""LayerNorm: y = (x - mean(x)) * rsqrt(var(x) + eps) * weight + bias, mean and variance over the last axis.

Source: Ba, Kiros and Hinton, "Layer Normalization", https://arxiv.org/abs/1607.06450.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from xlafuse.triton_side.calls.stages import stage


def apply(inputs: Mapping[str, Tensor], *, eps: float) -> dict[str, Tensor]:
    """x [rows, columns], weight, bias [columns] -> y [rows, columns].

    The computation is in float32, weight and bias included, and stored in x's dtype. The variance is the mean square of
    x minus its mean.
    """
    x, weight, bias = inputs["x"], inputs["weight"], inputs["bias"]
    with stage("mean"):
        x_fp32 = x.float()
        mean = x_fp32.mean(dim=-1, keepdim=True)
    with stage("variance"):
        centred = x_fp32 - mean
        variance = (centred * centred).mean(dim=-1, keepdim=True)
    with stage("normalize"):
        normalized = centred * torch.rsqrt(variance + eps)
    with stage("weight"):
        scaled = normalized * weight.float()
    with stage("bias"):
        y = (scaled + bias.float()).to(x.dtype)
    return {"y": y}
