"""GEGLU: y = gelu(gate) * up with GELU in its tanh form.

Source: Shazeer, "GLU Variants Improve Transformer", https://arxiv.org/abs/2002.05202.
"""

from collections.abc import Mapping

from torch import Tensor

from xlafuse.triton_side.blocks import gelu
from xlafuse.triton_side.calls.stages import stage


def apply(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """gate, up [rows, columns] -> y [rows, columns]; see gelu for rounding, and for gradients of a large float16 gate.
    """
    activated = gelu.apply({"x": inputs["gate"]})["y"]  # in the stage "gelu"
    with stage("multiply"):
        y = activated * inputs["up"]
    return {"y": y}
