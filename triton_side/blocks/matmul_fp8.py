"""The matrix product of two float8_e4m3fn matrices, with a scale each: c = (a @ b^T) * a_scale * b_scale."""

from collections.abc import Mapping

import torch
from torch import Tensor

from xlafuse.triton_side.calls.stages import stage


def apply(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """a [m, k], b [n, k], a_scale [], b_scale [] -> c [m, n], bfloat16.

    PyTorch's `@` takes no fp8, so the operands are widened to bfloat16, which is exact. The product is rounded to
    bfloat16 before it is scaled.
    """
    with stage("widen"):
        a, b = inputs["a"].to(torch.bfloat16), inputs["b"].to(torch.bfloat16)
    with stage("product"):
        product = a @ b.T
    with stage("scale"):
        return {"c": (product.float() * (inputs["a_scale"] * inputs["b_scale"])).to(torch.bfloat16)}
