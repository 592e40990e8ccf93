"""SwiGLU: y = silu(gate) * up with silu(x) = x * sigmoid(x).

Source: Shazeer, "GLU Variants Improve Transformer", https://arxiv.org/abs/2002.05202.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from xlafuse.triton_side.calls.stages import stage


def apply(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """gate, up [rows, columns] -> y [rows, columns]; every operation is computed and rounded in the inputs' dtype."""
    gate = inputs["gate"]
    with stage("silu"):
        activated = gate * torch.sigmoid(gate)
    with stage("multiply"):
        y = activated * inputs["up"]
    return {"y": y}
