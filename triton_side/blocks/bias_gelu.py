"""GELU, tanh form, of a matrix plus a bias: y = gelu(x + bias)."""

from collections.abc import Mapping

from torch import Tensor

from xlafuse.triton_side.blocks import gelu
from xlafuse.triton_side.calls.stages import stage


def apply(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """x [rows, columns], bias [columns] -> y [rows, columns]; every operation is in x's dtype."""
    with stage("bias"):
        z = inputs["x"] + inputs["bias"]
    return gelu.apply({"x": z})
