"""SwiGLU, y = silu(gate) * up, by `torch.nn.functional.silu` and a product."""

from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor


def apply(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """gate, up [rows, columns] -> y [rows, columns]; two kernels, float32 inside each, silu rounded to gate's dtype."""
    return {"y": F.silu(inputs["gate"]) * inputs["up"]}
