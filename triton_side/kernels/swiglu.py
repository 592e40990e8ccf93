"""SwiGLU: y = silu(gate) * up, with silu(x) = x s, s = sigmoid(x), and its gradients.

    dgate = dy up (s + x s (1 - s))        dup = dy silu(gate)

Shazeer, "GLU variants improve Transformer", arXiv:2002.05202. Shapes: gate, up, y [rows, columns] (any one shape is
taken as flat). bfloat16, float16 or float32 in and out; fp32 inside. One pass over memory each way
(shared/gated_unit.py).
"""

import math

import torch
import triton
import triton.language as tl

from xlafuse.triton_side.calls import declare
from xlafuse.triton_side.kernels.gelu import divide
from xlafuse.triton_side.kernels.shared.gated_unit import backward_block, forward_block, gated_unit

# Operations as the plain block writes them; the kernels compute the same values in other steps.
SILU = (("logistic", "sigmoid"), ("mul", "silu"))
FORWARD = (*(declare.forward(op, "silu", result) for op, result in SILU), declare.forward("mul", "multiply", "y"))
BACKWARD = (
    *(declare.again(op, "silu", result) for op, result in SILU),
    declare.gradient("mul", "multiply", "dsilu"), declare.gradient("mul", "multiply", "dup"),
    declare.gradient("logistic", "silu", "dsigmoid"), declare.gradient("mul", "silu", "dgate"),
)


@triton.jit
def silu_value(x, ACCURATE: tl.constexpr):
    # For large negative x the exponential is inf, and x / inf = -0 is correct.
    return divide(x, 1.0 + tl.exp(-x), ACCURATE)


@triton.jit
def silu_value_and_slope(x, ACCURATE: tl.constexpr):
    sigmoid = divide(1.0, 1.0 + tl.exp(-x), ACCURATE)
    silu = x * sigmoid
    return silu, sigmoid + silu * (1.0 - sigmoid)


@declare.declare(*FORWARD, flops=lambda shapes: 5 * math.prod(shapes["y_ptr"]))
@triton.jit
def swiglu_forward_kernel(gate_ptr, up_ptr, y_ptr, elements, BLOCK: tl.constexpr, TF32: tl.constexpr = False):
    forward_block(gate_ptr, up_ptr, y_ptr, elements, silu_value, BLOCK, TF32)


@declare.declare(*BACKWARD, flops=lambda shapes: 10 * math.prod(shapes["dy_ptr"]))
@triton.jit
def swiglu_backward_kernel(gate_ptr, up_ptr, dy_ptr, dgate_ptr, dup_ptr, elements, BLOCK: tl.constexpr):
    backward_block(gate_ptr, up_ptr, dy_ptr, dgate_ptr, dup_ptr, None, elements, silu_value_and_slope, BLOCK)


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up; arguments, result and errors are those of `gated_unit`."""
    return gated_unit(gate, up, swiglu_forward_kernel, swiglu_backward_kernel)


def apply(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Run the block `swiglu`: gate[rows, columns], up[rows, columns] -> y[rows, columns]."""
    return {"y": swiglu(inputs["gate"], inputs["up"])}
