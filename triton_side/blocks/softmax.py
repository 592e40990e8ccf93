"""Softmax over the last axis: y = exp(x - max(x)) / sum(exp(x - max(x))); zeros for a row of -inf alone."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from triton_side.calls.stages import stage


def apply(inputs: Mapping[str, Tensor], masked: int = 0) -> dict[str, Tensor]:
    """x [rows, columns] -> y [rows, columns]; computed in float32, stored in x's dtype. masked: how many rows are -inf
    alone; where none is, nothing is selected for their sake."""
    x = inputs["x"]
    with stage("max"):
        x_fp32 = x.float()
        # Softmax does not depend on the value subtracted, so the gradient through the maximum is zero.
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
