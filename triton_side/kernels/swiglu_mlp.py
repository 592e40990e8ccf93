"""The feed-forward half of a Llama layer: y = x + (silu(h Wg) * (h Wu)) Wd with h = rmsnorm(x).

Shazeer, "GLU variants improve Transformer", arXiv:2002.05202. The forward pass has five kernels: RMSNorm; the products
for gate and up; act = silu(gate) * up; and the down projection, whose epilogue adds x. The backward pass is

    dact = dy Wd^T
    dgate = dact up silu'(gate)    dup = dact silu(gate)    (one kernel, which also recomputes act)

    dWd = act^T dy    dWg = h^T dgate    dWu = h^T dup
    dh = dgate Wg^T + dup Wu^T    dx = dy + RMSNorm's backward pass of dh    (one kernel, which adds dy)

Fewer and larger kernels were slower (H200, Triton 3.6; `docs/kernels/products.md`). One kernel for gate, up and act has
two accumulators of 128 x 128 and reaches 735 TFLOP/s, where one of 128 x 256 reaches 800. An epilogue that reads gate
and computes act takes 44 us more, Inductor's separate pass 40: the tensor cores wait for an epilogue's memory traffic.

Shapes: x, y, h [tokens, width]; norm_weight [width]; gate_weight, up_weight [width, hidden]; down_weight
[hidden, width]; gate, up, act [tokens, hidden]. dtypes: bfloat16, float16, float32, one for all. Products accumulate in
float32, and activations are computed in it from stored products. With gradients, the forward pass saves h, gate and up.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from xlafuse.triton_side.calls.declare import again, computing, declare, forward, gradient
from xlafuse.triton_side.calls.stages import stage
from xlafuse.triton_side.kernels import rmsnorm
from xlafuse.triton_side.kernels.matmul import choose_config, launch_matmul, matmul_config
from xlafuse.triton_side.kernels.shared import gated_unit
from xlafuse.triton_side.kernels.shared.gated_unit import backward_block
from xlafuse.triton_side.kernels.shared.launch import FlatConfig, check_matrix, check_tensors, launch_elementwise
from xlafuse.triton_side.kernels.shared.tiles import product_precision
from xlafuse.triton_side.kernels.swiglu import silu_value_and_slope, swiglu_forward_kernel

ACTIVATION = (("logistic", "sigmoid"), ("mul", "silu"), ("mul", "activated"))
ACT = tuple(forward(op, "act", result) for op, result in ACTIVATION)
GATE = (forward("dot", "gate"),)
UP = (forward("dot", "up"),)
DOWN = (forward("dot", "down"), forward("add", "residual"))
DACT = (gradient("dot", "down", "dact"),)
ACTIVATION_GRADIENTS = (
    *(again(op, "act", result) for op, result in ACTIVATION),
    gradient("mul", "act", "dsilu"), gradient("mul", "act", "dup"), gradient("logistic", "act", "dgate"),
)
DDOWN_WEIGHT = (gradient("dot", "down", "ddown_weight"),)
DGATE_WEIGHT = (gradient("dot", "gate", "dgate_weight"),)
DUP_WEIGHT = (gradient("dot", "up", "dup_weight"),)
DH_OF_GATE = (gradient("dot", "gate", "dh"),)
DH_OF_UP = (gradient("dot", "up", "dh"), gradient("add", "up", "dh"))


@declare(*ACTIVATION_GRADIENTS, flops=lambda shapes: 13 * math.prod(shapes["dact_ptr"]))
@triton.jit
def activation_gradients_kernel(
    dact_ptr, gate_ptr, up_ptr, dgate_ptr, dup_ptr, act_ptr, elements, BLOCK: tl.constexpr, TF32: tl.constexpr = False
):
    """Compute dgate, dup and act from a stored dact, element by element."""
    backward_block(gate_ptr, up_ptr, dact_ptr, dgate_ptr, dup_ptr, act_ptr, elements, silu_value_and_slope, BLOCK, TF32)


def launch_activation_gradients(
    dact: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, **constants: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return dgate, dup and act from a stored dact; all are contiguous."""
    dgate, dup, act = torch.empty_like(gate), torch.empty_like(gate), torch.empty_like(gate)
    config = FlatConfig(block=2048, num_warps=8)
    launch_elementwise(activation_gradients_kernel, config, dact, gate, up, dgate, dup, act, **constants)
    return dgate, dup, act


def _project(
    x: torch.Tensor, h: torch.Tensor, gate_weight: torch.Tensor, up_weight: torch.Tensor, down_weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return y, gate and up."""
    with computing(*GATE, c_ptr="gate"):
        gate = launch_matmul(h, gate_weight, choose_config(matmul_config, h, gate_weight))
    with computing(*UP, c_ptr="up"):
        up = launch_matmul(h, up_weight, choose_config(matmul_config, h, up_weight))
    tf32 = product_precision(x.dtype) == "tf32"
    with computing(*ACT, y_ptr="act"):
        act = gated_unit.forward(swiglu_forward_kernel, gate, up, TF32=tf32)
    with computing(*DOWN, c_ptr="y"):
        config = choose_config(matmul_config, act, down_weight)
        y = launch_matmul(act, down_weight, config, residual=x.contiguous(), a_is_tf32=tf32)
    return y, gate, up


class _SwigluMlp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, norm_weight: torch.Tensor, gate_weight: torch.Tensor, up_weight: torch.Tensor,
        down_weight: torch.Tensor, eps: float,
    ) -> torch.Tensor:
        with stage("norm"), computing(y_ptr="h"):
            h, rstd = rmsnorm.forward(x, norm_weight, eps, save_rstd=True)
        y, gate, up = _project(x, h, gate_weight, up_weight, down_weight)
        ctx.save_for_backward(x, norm_weight, gate_weight, up_weight, down_weight, rstd, h, gate, up)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, norm_weight, gate_weight, up_weight, down_weight, rstd, h, gate, up = ctx.saved_tensors
        with computing(*DACT, c_ptr="dact"):
            dact = launch_matmul(dy, down_weight.T, choose_config(matmul_config, dy, down_weight.T))
        tf32 = product_precision(dy.dtype) == "tf32"
        dgate, dup, act = launch_activation_gradients(dact, gate, up, TF32=tf32)
        with computing(*DDOWN_WEIGHT, c_ptr="ddown_weight"):
            ddown = launch_matmul(act.T, dy, choose_config(matmul_config, act.T, dy))
        with computing(*DGATE_WEIGHT, c_ptr="dgate_weight"):
            dgate_weight = launch_matmul(h.T, dgate, choose_config(matmul_config, h.T, dgate))
        with computing(*DUP_WEIGHT, c_ptr="dup_weight"):
            dup_weight = launch_matmul(h.T, dup, choose_config(matmul_config, h.T, dup))
        with computing(*DH_OF_GATE, c_ptr="dh_of_gate"):
            config = choose_config(matmul_config, dgate, gate_weight.T)
            dh = launch_matmul(dgate, gate_weight.T, config, a_is_tf32=tf32)
        with computing(*DH_OF_UP, c_ptr="dh"):
            config = choose_config(matmul_config, dup, up_weight.T)
            dh = launch_matmul(dup, up_weight.T, config, residual=dh, a_is_tf32=tf32)
        with stage("norm"), computing(dsum_ptr="dy", dy_ptr="dh"):
            dx, dnorm_weight = rmsnorm.backward(x, norm_weight, rstd, dh, dsum=dy.contiguous())
        return dx, dnorm_weight, dgate_weight, dup_weight, ddown, None


def swiglu_mlp(
    x: torch.Tensor, norm_weight: torch.Tensor, gate_weight: torch.Tensor, up_weight: torch.Tensor,
    down_weight: torch.Tensor, eps: float,
) -> torch.Tensor:
    """Return x + (silu(h gate_weight) * (h up_weight)) down_weight with h = rmsnorm(x, norm_weight, eps).

    Differentiable once.

    Args:
        x: [tokens, width].
        norm_weight: [width].
        gate_weight, up_weight: [width, hidden].
        down_weight: [hidden, width].
        eps: added to the mean square of a row.

    Returns:
        y [tokens, width], contiguous, in the inputs' dtype.

    Raises:
        ValueError: shapes do not fit, devices differ or are not a GPU (outside the interpreter), or float32 products
            are set to "medium".
        TypeError: a dtype is not supported, or they differ.
    """
    weights = {"gate_weight": gate_weight, "up_weight": up_weight, "down_weight": down_weight}
    check_tensors(x=x, norm_weight=norm_weight, **weights)
    check_matrix("x", x)
    width, hidden = x.shape[1], gate_weight.shape[-1]
    expected = {"norm_weight": [width], "gate_weight": [width, hidden], "up_weight": [width, hidden],
                "down_weight": [hidden, width]}
    got = {name: list(tensor.shape) for name, tensor in {"norm_weight": norm_weight, **weights}.items()}
    if got != expected:
        raise ValueError(
            f"the weights must fit x {list(x.shape)} and one hidden size: expected {expected}, got {got}; "
            "weights are [inputs, outputs], transpose a torch.nn.Linear's weights"
        )
    tensors = (x, norm_weight, gate_weight, up_weight, down_weight)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return _SwigluMlp.apply(*tensors, eps)
    with stage("norm"), computing(y_ptr="h"):
        h, _ = rmsnorm.forward(x, norm_weight, eps, save_rstd=False)
    y, _, _ = _project(x, h, gate_weight, up_weight, down_weight)
    return y


def apply(inputs: dict[str, torch.Tensor], *, eps: float) -> dict[str, torch.Tensor]:
    """Run the block `swiglu_mlp`: x, norm_weight, gate_weight, up_weight, down_weight -> y."""
    return {"y": swiglu_mlp(**inputs, eps=eps)}
