"""A linear layer: y = x @ weight + bias."""

from collections.abc import Mapping

from torch import Tensor

from xlafuse.triton_side.calls.stages import stage


def apply(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """x [m, k], weight [k, n], bias [n] -> y [m, n].

    Product and sum are rounded in x's dtype; float32 products follow `torch.get_float32_matmul_precision()`.
    """
    with stage("product"):
        product = inputs["x"] @ inputs["weight"]
    with stage("bias"):
        return {"y": product + inputs["bias"]}
