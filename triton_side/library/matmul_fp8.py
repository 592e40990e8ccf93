"""The matrix product of two float8_e4m3fn matrices by `torch._scaled_mm`, with one scale per matrix."""

from collections.abc import Mapping

import torch
from torch import Tensor


def apply(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """a [m, k], b [n, k], a_scale [], b_scale [] -> c [m, n], bfloat16. On a GPU, k and n must be multiples of 16.

    cuBLASLt periodically promotes the tensor cores' sums to a higher precision.
    """
    return _scaled(inputs, fast=False)


def apply_fast(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same without the promotion: less accurate and faster (cuBLAS, CUBLASLT_MATMUL_DESC_FAST_ACCUM).

    torchao chooses it for the forward product (Float8LinearConfig.gemm_config_output).
    """
    return _scaled(inputs, fast=True)


def _scaled(inputs: Mapping[str, Tensor], fast: bool) -> dict[str, Tensor]:
    return {
        "c": torch._scaled_mm(
            inputs["a"], inputs["b"].T, scale_a=inputs["a_scale"], scale_b=inputs["b_scale"],
            out_dtype=torch.bfloat16, use_fast_accum=fast,
        )
    }
