"""Softmax over the last axis by `torch.nn.functional.softmax`."""

from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor


def apply(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """x [rows, columns] -> y [rows, columns]; one kernel, float32 inside, stored in x's dtype.

    `F.softmax(..., dtype=torch.float32)` would return float32, which is twice the bytes. The CUDA and CPU kernels
    accumulate half precision in float32 without it.
    """
    return {"y": F.softmax(inputs["x"], dim=-1)}
