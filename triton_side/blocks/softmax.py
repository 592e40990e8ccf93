"""Softmax over the last axis: y = exp(x - max(x)) / sum(exp(x - max(x))); zeros for a row of -inf alone."""

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from triton_side.stages import stage


def apply(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """x [rows, columns] -> y [rows, columns]; computed in float32, stored in x's dtype. A row of -inf alone gives
    zeros and has zero gradients.

    There the maximum is -inf and the formula NaN, and stays so: Inductor takes maximum and sum in one reading of the
    row only where they are written as here, and with the maximum clamped reads long rows once more. So y is selected
    after it. Before it, the threshold leaves every value as it is, and no gradient to the elements that are -inf.
    """
    x = F.threshold(inputs["x"], -math.inf, -math.inf)
    with stage("max"):
        x_fp32 = x.float()
        # Softmax does not depend on the value subtracted, so the gradient through the maximum is zero.
        maximum = x_fp32.amax(dim=-1, keepdim=True).detach()
    with stage("exp"):
        exponentials = torch.exp(x_fp32 - maximum)
    with stage("sum"):
        total = exponentials.sum(dim=-1, keepdim=True)
    with stage("divide"):
        y = (exponentials / total).to(x.dtype)
        y = y.masked_fill(maximum == -math.inf, 0.0)
    return {"y": y}
