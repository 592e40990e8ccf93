"""RMSNorm over the last axis by `torch.nn.functional.rms_norm`."""

from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor


def apply(inputs: Mapping[str, Tensor], *, eps: float) -> dict[str, Tensor]:
    """x [rows, columns], weight [columns] -> y [rows, columns] = x * rsqrt(mean(x^2) + eps) * weight.

    float32 inside to the end, weight included, stored in x's dtype.
    """
    x, weight = inputs["x"], inputs["weight"]
    return {"y": F.rms_norm(x, weight.shape, weight, eps)}
