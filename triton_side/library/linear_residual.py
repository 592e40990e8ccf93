"""A linear layer added to the residual stream by `torch.addmm`."""

from collections.abc import Mapping

import torch
from torch import Tensor


def apply(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """x [m, k], weight [k, n], residual [m, n] -> y [m, n].

    On a GPU the residual is copied into y, and cuBLAS adds the product to it (beta = 1). float32 products follow
    `torch.get_float32_matmul_precision()`.
    """
    return {"y": torch.addmm(inputs["residual"], inputs["x"], inputs["weight"])}
