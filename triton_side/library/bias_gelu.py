"""A bias added to the rows of a matrix, then GELU, tanh approximation, by `torch.nn.functional.gelu`."""

from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor


def apply(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """x [rows, columns], bias [columns] -> y [rows, columns]; two kernels, between them the sum in x's dtype."""
    return {"y": F.gelu(inputs["x"] + inputs["bias"], approximate="tanh")}
