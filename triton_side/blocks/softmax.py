"""Softmax over the last axis: y = exp(x - max(x)) / sum(exp(x - max(x))). A row of only -inf gives zeros."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from xlafuse.triton_side.calls.stages import stage


def apply(inputs: Mapping[str, Tensor], masked: int = 0) -> dict[str, Tensor]:
    """x [rows, columns] -> y [rows, columns]; computed in float32, stored in x's dtype.

    masked: how many rows are only -inf. With 0, the operations that handle such rows are left out.
    """
    x = inputs["x"]
    with stage("max"):
        x_fp32 = x.float()
        # Softmax does not depend on the subtracted value, so the gradient through the maximum is zero.
        maximum = x_fp32.amax(dim=-1, keepdim=True).detach()
        if masked:
            maximum = torch.where(maximum == -math.inf, 0.0, maximum)
    with stage("exp"):
        exponentials = torch.exp(x_fp32 - maximum)
    with stage("sum"):
        total = exponentials.sum(dim=-1, keepdim=True)
        if masked:
            total = torch.where(total == 0, 1.0, total)
    with stage("divide"):
        y = (exponentials / total).to(x.dtype)
    return {"y": y}
