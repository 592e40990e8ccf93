"""GEGLU, y = gelu(gate) * up with the tanh form of GELU, by `torch.nn.functional.gelu` and a product."""

from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor


def apply(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """gate, up [rows, columns] -> y [rows, columns]; two kernels, float32 inside each, gelu rounded to gate's dtype."""
    return {"y": F.gelu(inputs["gate"], approximate="tanh") * inputs["up"]}
