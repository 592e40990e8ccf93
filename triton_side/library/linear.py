"""A linear layer by `torch.nn.functional.linear`."""

from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor


def apply(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """x [m, k], weight [k, n], bias [n] -> y [m, n]; on a GPU cuBLASLt adds the bias in its epilogue.

    float32 products follow `torch.get_float32_matmul_precision()`.
    """
    return {"y": F.linear(inputs["x"], inputs["weight"].T, inputs["bias"])}
