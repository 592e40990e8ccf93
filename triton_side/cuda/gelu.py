"""GELU in its tanh form, y = 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))), in CUDA C++ (gelu.cu), with its gradient.

Source: Hendrycks and Gimpel, Gaussian Error Linear Units (arXiv:1606.08415), section 2. The kernels compute
x sigmoid(2u) in fp32, which is the same function of u = sqrt(2/pi) (x + 0.044715 x^3), and store x's dtype. Any shape
works. The backward pass reads x and dy and writes dx; it needs no other saved tensor.

On sm_90 in bf16 the forward kernel takes about 14 instructions per element, the backward kernel 27. At copy speed an
H200 has about 27 and 40 issue slots per element, so both kernels are bound by memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from xlafuse.triton_side.calls.declare import declare_template
from xlafuse.triton_side.cuda.common import tensors
from xlafuse.triton_side.cuda.common.launch import launch_elementwise
from xlafuse.triton_side.kernels.gelu import BACKWARD, FORWARD

declare_template("gelu.cu", "gelu_forward", *FORWARD, flops=lambda shapes: 9 * math.prod(shapes["x"]))
declare_template("gelu.cu", "gelu_backward", *BACKWARD, flops=lambda shapes: 17 * math.prod(shapes["x"]))


class Gelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x)
        y = torch.empty_like(x)
        launch_elementwise("gelu.cu", "gelu_forward", (x,), y)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        dx = torch.empty_like(x)
        launch_elementwise("gelu.cu", "gelu_backward", (x, dy.contiguous()), dx)
        return dx


def gelu(x: torch.Tensor) -> torch.Tensor:
    """Return the GELU (tanh form) of a CUDA tensor of float32, float16 or bfloat16.

    A non-contiguous input is copied first.

    Raises:
        TypeError: another dtype.
        ValueError: not on a CUDA device.
    """
    tensors.check("gelu", x=x)
    return Gelu.apply(x)


def apply(inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {"y": gelu(inputs["x"])}
