"""GELU, tanh approximation: y = 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))).

Source: Hendrycks and Gimpel, "Gaussian Error Linear Units (GELUs)", https://arxiv.org/abs/1606.08415.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from xlafuse.triton_side.calls.stages import stage

_SQRT_2_OVER_PI = math.sqrt(2 / math.pi)


def apply(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """x [rows, columns] -> y [rows, columns].

    Every operation is computed and rounded in x's dtype. In eager float16 the gradient is NaN where |x| >= 256: x * x
    overflows to infinity, which is multiplied by tanh's derivative of zero.
    """
    x = inputs["x"]
    with stage("gelu"):
        inner = _SQRT_2_OVER_PI * (x + 0.044715 * (x * x * x))
        y = 0.5 * x * (1 + torch.tanh(inner))
    return {"y": y}
