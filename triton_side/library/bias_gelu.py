"""GELU, tanh approximation, of a matrix plus a bias, by `torch.nn.functional.gelu`."""

from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor


def apply(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """x [rows, columns], bias [columns] -> y [rows, columns]; two kernels, with the sum in x's dtype between them."""
    return {"y": F.gelu(inputs["x"] + inputs["bias"], approximate="tanh")}
