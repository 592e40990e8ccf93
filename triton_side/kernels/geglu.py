"""GEGLU: y = gelu(gate) * up with the tanh form of GELU, and its gradients.

    dgate = dy up gelu'(gate)        dup = dy gelu(gate)

Shazeer, "GLU variants improve Transformer", arXiv:2002.05202; GELU and its derivative are in `gelu.py`. Shapes: gate,
up, y [rows, columns] (any one shape is taken as flat). bfloat16, float16 or float32 in and out; fp32 inside. One pass
over memory each way (shared/gated_unit.py).
"""

import math

import torch
import triton
import triton.language as tl

from xlafuse.triton_side.calls import declare
from xlafuse.triton_side.kernels import gelu
from xlafuse.triton_side.kernels.gelu import gelu_value, gelu_value_and_slope
from xlafuse.triton_side.kernels.shared.gated_unit import backward_block, forward_block, gated_unit

FORWARD = (*gelu.FORWARD, declare.forward("mul", "multiply", "y"))
BACKWARD = (
    *gelu.BACKWARD,
    declare.again("add", "gelu", "1 + tanh"), declare.again("mul", "gelu", "y"),
    declare.gradient("mul", "multiply", "dgelu"), declare.gradient("mul", "multiply", "dup"),
)


@declare.declare(*FORWARD, flops=lambda shapes: 10 * math.prod(shapes["y_ptr"]))
@triton.jit
def geglu_forward_kernel(gate_ptr, up_ptr, y_ptr, elements, BLOCK: tl.constexpr):
    forward_block(gate_ptr, up_ptr, y_ptr, elements, gelu_value, BLOCK)


@declare.declare(*BACKWARD, flops=lambda shapes: 21 * math.prod(shapes["dy_ptr"]))
@triton.jit
def geglu_backward_kernel(gate_ptr, up_ptr, dy_ptr, dgate_ptr, dup_ptr, elements, BLOCK: tl.constexpr):
    backward_block(gate_ptr, up_ptr, dy_ptr, dgate_ptr, dup_ptr, None, elements, gelu_value_and_slope, BLOCK)


def geglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return gelu(gate) * up; arguments, result and errors are those of `gated_unit`."""
    return gated_unit(gate, up, geglu_forward_kernel, geglu_backward_kernel)


def apply(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Run the block `geglu`: gate[rows, columns], up[rows, columns] -> y[rows, columns]."""
    return {"y": geglu(inputs["gate"], inputs["up"])}
