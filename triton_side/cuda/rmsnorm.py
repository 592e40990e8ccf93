"""RMSNorm over the last axis in CUDA C++ (rmsnorm.cu), with its gradients.

    y  = n w,  n = x rstd,  rstd = 1 / sqrt(mean(x^2) + eps)

    dx = rstd (g - n mean(g n)),  g = dy w       dw = sum of dy n

Source: Zhang and Sennrich, Root Mean Square Layer Normalization (arXiv:1910.07467). The kernels compute in fp32 and
store x's dtype. If a backward pass will follow, the forward pass saves rstd: 4 bytes a row.

Rows are held and streamed as in layer norm (`layernorm.py`). Each block writes one row of fp32 partial sums of dw; a
second kernel adds these up.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from xlafuse.triton_side.calls.declare import declare_template
from xlafuse.triton_side.cuda.common import tensors
from xlafuse.triton_side.cuda.layernorm import launch_norm_backward, launch_norm_forward
from xlafuse.triton_side.kernels.rmsnorm import DWEIGHT, DX, FORWARD, NORMALIZED_AGAIN, PARTIAL_DWEIGHT

for variant in ("", "_streaming"):
    declare_template(
        "rmsnorm.cu", f"rmsnorm_forward{variant}", *FORWARD, flops=lambda shapes: 4 * math.prod(shapes["x"])
    )
declare_template(
    "rmsnorm.cu", "rmsnorm_backward", NORMALIZED_AGAIN, *DX, *PARTIAL_DWEIGHT,
    flops=lambda shapes: 9 * math.prod(shapes["x"]),
)
declare_template(
    "rmsnorm.cu", "rmsnorm_backward_streaming", NORMALIZED_AGAIN, *DX, flops=lambda shapes: 7 * math.prod(shapes["x"])
)
declare_template(
    "rmsnorm.cu", "rmsnorm_partials", NORMALIZED_AGAIN, *PARTIAL_DWEIGHT,
    flops=lambda shapes: 3 * math.prod(shapes["x"]),
)
declare_template(
    "rmsnorm.cu", "rmsnorm_sum_partials", DWEIGHT, flops=lambda shapes: math.prod(shapes["partial"]),
)


def forward_pass(
    x: torch.Tensor, weight: torch.Tensor, eps: float, save: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return y, and with `save` each row's rstd in fp32, else None. All inputs are contiguous."""
    y = torch.empty_like(x)
    columns = x.shape[-1]
    rows = x.numel() // max(columns, 1)
    rstd = torch.empty(rows, dtype=torch.float32, device=x.device) if save else None
    if x.numel() == 0:
        return y, rstd
    launch_norm_forward("rmsnorm.cu", (x, weight), y, (rstd,), eps)
    return y, rstd


def backward_pass(
    x: torch.Tensor, weight: torch.Tensor, rstd: torch.Tensor, dy: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return dx and dweight. All inputs are contiguous."""
    dx = torch.empty_like(x)
    if x.numel() == 0:
        return dx, torch.zeros_like(weight)
    dweight = torch.empty_like(weight)
    launch_norm_backward("rmsnorm.cu", x, weight, (rstd,), dy, dx, (dweight,))
    return dx, dweight


class RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        y, rstd = forward_pass(x, weight, eps, save=True)
        ctx.save_for_backward(x, weight, rstd)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        x, weight, rstd = ctx.saved_tensors
        return *backward_pass(x, weight, rstd, dy.contiguous()), None


def rmsnorm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight over the last axis of a CUDA tensor.

    Both are float32, float16 or bfloat16; weight has one element for each column. Non-contiguous inputs are copied
    first.

    Raises:
        TypeError: another dtype, or several.
        ValueError: not on one CUDA device, no axis, more than 2**30 columns, or another shape of weight.
    """
    tensors.check_rows("rmsnorm", x=x)
    tensors.check_vectors("rmsnorm", x, weight=weight)
    training = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    x, weight = x.contiguous(), weight.contiguous()
    if training:
        return RMSNorm.apply(x, weight, eps)
    return forward_pass(x, weight, eps, save=False)[0]


def apply(inputs: Mapping[str, torch.Tensor], *, eps: float) -> dict[str, torch.Tensor]:
    return {"y": rmsnorm(inputs["x"], inputs["weight"], eps)}
