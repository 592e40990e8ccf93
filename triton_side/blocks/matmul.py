"""The matrix product: c = a @ b."""

from collections.abc import Mapping

from torch import Tensor

from xlafuse.triton_side.calls.stages import stage


def apply(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """a [m, k], b [k, n] -> c [m, n]. float32 products follow `torch.get_float32_matmul_precision()`."""
    with stage("product"):
        c = inputs["a"] @ inputs["b"]
    return {"c": c}
