"""The matrix product of two float8_e4m3fn matrices, with a scale each, by `torch._scaled_mm`."""

from collections.abc import Mapping

import torch
from torch import Tensor


def apply(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """a [m, k], b [n, k], a_scale [], b_scale [] -> c [m, n], bfloat16; on a GPU 16 must divide k and n.

    Without `use_fast_accum`, cuBLASLt periodically promotes the tensor cores' sums to a higher precision, which costs
    speed (cuBLAS documentation, CUBLASLT_MATMUL_DESC_FAST_ACCUM).
    """
    return {
        "c": torch._scaled_mm(
            inputs["a"], inputs["b"].T, scale_a=inputs["a_scale"], scale_b=inputs["b_scale"],
            out_dtype=torch.bfloat16, use_fast_accum=False,
        )
    }
