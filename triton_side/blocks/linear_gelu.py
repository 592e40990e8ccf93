"""A linear layer with GELU, tanh approximation: y = gelu(x @ weight + bias).

Source: Hendrycks and Gimpel, "Gaussian Error Linear Units (GELUs)", https://arxiv.org/abs/1606.08415.
"""

from collections.abc import Mapping

from torch import Tensor

from xlafuse.triton_side.blocks import gelu
from xlafuse.triton_side.calls.stages import stage


def apply(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """x [m, k], weight [k, n], bias [n] -> y [m, n].

    Every operation is computed and rounded in x's dtype; float32 products follow
    `torch.get_float32_matmul_precision()`. In eager float16 the gradient is NaN where |x @ weight + bias| >= 256, as
    in `gelu`.
    """
    with stage("product"):
        product = inputs["x"] @ inputs["weight"]
    with stage("bias"):
        pre = product + inputs["bias"]
    return gelu.apply({"x": pre})
