"""A linear layer with GELU, by `torch.nn.functional.linear` and `torch.nn.functional.gelu`: two library calls."""

from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor


def apply(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """x [m, k], weight [k, n], bias [n] -> y [m, n]; the product's library call adds the bias.

    float32 products follow `torch.get_float32_matmul_precision()`.
    """
    pre = F.linear(inputs["x"], inputs["weight"].T, inputs["bias"])
    return {"y": F.gelu(pre, approximate="tanh")}
