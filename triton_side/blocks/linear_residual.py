"""A linear layer added to the residual stream: y = residual + x @ weight."""

from collections.abc import Mapping

from torch import Tensor

from xlafuse.triton_side.calls.stages import stage


def apply(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """x [m, k], weight [k, n], residual [m, n] -> y [m, n].

    Product and sum are rounded in x's dtype; float32 products follow `torch.get_float32_matmul_precision()`.
    """
    with stage("product"):
        product = inputs["x"] @ inputs["weight"]
    with stage("residual"):
        return {"y": inputs["residual"] + product}
