"""GELU in its tanh form, forward and backward.

    y  = 0.5 x (1 + tanh(u)) = x s                    u = sqrt(2/pi) (x + 0.044715 x^3),  s = sigmoid(2u)

    dx = dy (s + 2 x s (1 - s) u')                    u' = sqrt(2/pi) (1 + 3 * 0.044715 x^2)

Hendrycks and Gimpel, "Gaussian Error Linear Units", arXiv:1606.08415. Shapes: x, y, dy, dx [rows, columns] (any shape
is taken as flat). bfloat16, float16 or float32 in and out; fp32 inside. The forward pass saves x.

1 + tanh(u) = 2 sigmoid(2u) takes one exponential and one division, and no library call. Unlike 1 + tanh(u), it does not
cancel for negative x.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from xlafuse.triton_side.calls import declare
from xlafuse.triton_side.configs.tuned import tuned
from xlafuse.triton_side.kernels.shared.constants import LOG2_E
from xlafuse.triton_side.kernels.shared.launch import FlatConfig, check_tensors, launch_elementwise

SQRT_2_OVER_PI = 0.7978845608028654
CUBIC = 0.044715
# exp(-2u) = exp2(x (LINEAR_EXPONENT + CUBIC_EXPONENT x^2))
LINEAR_EXPONENT = tl.constexpr(-2 * SQRT_2_OVER_PI * LOG2_E.value)
CUBIC_EXPONENT = tl.constexpr(-2 * SQRT_2_OVER_PI * CUBIC * LOG2_E.value)
# 2 u' = LINEAR_SLOPE + QUADRATIC_SLOPE x^2
LINEAR_SLOPE = tl.constexpr(2 * SQRT_2_OVER_PI)
QUADRATIC_SLOPE = tl.constexpr(6 * SQRT_2_OVER_PI * CUBIC)

# Operations as the plain block writes them; the kernels compute the same values in other steps.
FORWARD = tuple(
    declare.forward(op, "gelu", result)
    for op, result in (("mul", "cube"), ("add", "inner"), ("tanh", "tanh"), ("add", "1 + tanh"), ("mul", "y"))
)
BACKWARD = (
    *(declare.again(op, "gelu", result) for op, result in (("mul", "cube"), ("add", "inner"), ("tanh", "tanh"))),
    declare.gradient("tanh", "gelu"), declare.gradient("mul", "gelu", "dx"),
)


@triton.jit
def divide(numerator, denominator, ACCURATE: tl.constexpr):
    """Return numerator / denominator; the compiler's own division errs by up to two ulps, which only fp32 shows."""
    if ACCURATE:
        return tl.div_rn(numerator, denominator)
    else:
        return numerator / denominator


@triton.jit
def gelu_value(x, ACCURATE: tl.constexpr):
    # For large negative x the exponential is inf, and y = x / inf = -0 is correct.
    return divide(x, 1.0 + tl.exp2(x * (LINEAR_EXPONENT + CUBIC_EXPONENT * x * x)), ACCURATE)


@triton.jit
def gelu_value_and_slope(x, ACCURATE: tl.constexpr):
    # exp(-2|u|) never overflows, and s (1 - s) = exp(-2|u|) / (1 + exp(-2|u|))^2 does not cancel near s = 1.
    exponential = tl.exp2(tl.abs(x) * (LINEAR_EXPONENT + CUBIC_EXPONENT * x * x))
    larger = divide(1.0, 1.0 + exponential, ACCURATE)
    smaller = exponential * larger
    sigmoid = tl.where(x >= 0.0, larger, smaller)
    return x * sigmoid, sigmoid + x * (larger * smaller) * (LINEAR_SLOPE + QUADRATIC_SLOPE * x * x)


@declare.declare(*FORWARD, flops=lambda shapes: 9 * math.prod(shapes["x_ptr"]))
@triton.jit
def gelu_forward_kernel(x_ptr, y_ptr, elements, BLOCK: tl.constexpr):
    accurate: tl.constexpr = y_ptr.dtype.element_ty == tl.float32
    start = tl.program_id(0).to(tl.int64) * BLOCK
    offset = start + tl.arange(0, BLOCK)
    # Unless `elements` is a multiple of 16, a mask prevents 16-byte accesses. Only the last block is masked.
    if start + BLOCK <= elements:
        x = tl.load(x_ptr + offset).to(tl.float32)
        tl.store(y_ptr + offset, gelu_value(x, accurate).to(y_ptr.dtype.element_ty))
    else:
        mask = offset < elements
        x = tl.load(x_ptr + offset, mask=mask, other=0.0).to(tl.float32)
        tl.store(y_ptr + offset, gelu_value(x, accurate).to(y_ptr.dtype.element_ty), mask=mask)


@declare.declare(*BACKWARD, flops=lambda shapes: 17 * math.prod(shapes["x_ptr"]))
@triton.jit
def gelu_backward_kernel(x_ptr, dy_ptr, dx_ptr, elements, BLOCK: tl.constexpr):
    accurate: tl.constexpr = dx_ptr.dtype.element_ty == tl.float32
    start = tl.program_id(0).to(tl.int64) * BLOCK
    offset = start + tl.arange(0, BLOCK)
    if start + BLOCK <= elements:
        x = tl.load(x_ptr + offset).to(tl.float32)
        dy = tl.load(dy_ptr + offset).to(tl.float32)
        tl.store(dx_ptr + offset, (dy * gelu_value_and_slope(x, accurate)[1]).to(dx_ptr.dtype.element_ty))
    else:
        mask = offset < elements
        x = tl.load(x_ptr + offset, mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + offset, mask=mask, other=0.0).to(tl.float32)
        tl.store(dx_ptr + offset, (dy * gelu_value_and_slope(x, accurate)[1]).to(dx_ptr.dtype.element_ty), mask=mask)


@tuned
def configure(element_bytes: int) -> FlatConfig:
    """Four warps and one 16-byte load of each operand a thread, forward and backward.

    8192 x 16,384 of bfloat16 on an H200: 4279 GB/s forward (a copy 4277) and 4383 backward. With twice as many loads
    4227 and 4382, with four times as many 4225 and 4301.
    """
    return FlatConfig(block=128 * 16 // element_bytes, num_warps=4)


def forward(x: torch.Tensor, config: FlatConfig | None = None) -> torch.Tensor:
    """Launch the forward kernel on a contiguous x; the result y has x's shape and dtype."""
    y = torch.empty_like(x)
    launch_elementwise(gelu_forward_kernel, config or configure(x.element_size()), x, y)
    return y


def backward(x: torch.Tensor, dy: torch.Tensor, config: FlatConfig | None = None) -> torch.Tensor:
    """Launch the backward kernel on contiguous x and dy; the result dx has x's shape and dtype."""
    dx = torch.empty_like(x)
    launch_elementwise(gelu_backward_kernel, config or configure(x.element_size()), x, dy, dx)
    return dx


class GeluFunction(torch.autograd.Function):
    """Save x. The backward pass reads x and dy once and writes dx."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x)
        return forward(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return backward(x, dy.contiguous())


def gelu(x: torch.Tensor) -> torch.Tensor:
    """Return 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))), differentiable once.

    Args:
        x: a bfloat16, float16 or float32 tensor of any shape on a GPU. A non-contiguous one is copied.

    Returns:
        A new contiguous tensor of x's shape and dtype.

    Raises:
        ValueError: x is not on a GPU.
        TypeError: x has another dtype.
    """
    check_tensors(x=x)
    return GeluFunction.apply(x)


def apply(inputs: dict[str, torch.Tensor], **attributes: Any) -> dict[str, torch.Tensor]:
    """Run the block `gelu`: x[rows, columns] -> y[rows, columns]."""
    return {"y": gelu(inputs["x"], **attributes)}
