"""LayerNorm over the last axis by `torch.nn.functional.layer_norm`."""

from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor


def apply(inputs: Mapping[str, Tensor], *, eps: float) -> dict[str, Tensor]:
    """x [rows, columns], weight, bias [columns] -> y [rows, columns] = (x - mean) * rsqrt(var + eps) * weight + bias.

    float32 inside to the end, weight and bias included, stored in x's dtype.
    """
    x, weight, bias = inputs["x"], inputs["weight"], inputs["bias"]
    return {"y": F.layer_norm(x, weight.shape, weight, bias, eps)}
