"""Liger's Triton kernels (liger-kernel, https://github.com/linkedin/Liger-Kernel), an optional package: its code for an
H200 was looked at in 0.8.5.

Its autograd functions are called from the modules that define them, so that no other implementation is put in their
place by device or environment, as `liger_kernel.ops` does.

What it has for a block and is not here:

- cross_entropy: writes the gradient over the logits in its forward pass (zeros for ignored labels even without
  gradients), and returns a loss in the logits' dtype.
- rope: turns q and k where they lie, unless their layout had it copy them first, which it does not where their heads or
  their sequence is of length one.
- swiglu and geglu write the gradients over gate and up, so they are here for inference alone.
- swiglu_mlp: its MLP takes weights as torch.nn.Linear has them, [out, in], and would copy ours in every call.
- moe: takes an expert's gate and up as one matrix, and ours would be copied into one in every call.
- embedding: experimental; a table's gradient is added up atomically, in the table's dtype.
- dropout_residual_norm: what it adds to a residual it normalizes by RMSNorm, and drops nothing.
- attention: of other kinds alone (neighborhoods, multi-token).
"""

from collections.abc import Mapping

import torch
from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction
from liger_kernel.ops.geglu import LigerGELUMulFunction
from liger_kernel.ops.layer_norm import LigerLayerNormFunction
from liger_kernel.ops.rms_norm import LigerRMSNormFunction
from liger_kernel.ops.softmax import LigerSoftmaxFunction
from liger_kernel.ops.swiglu import LigerSiLUMulFunction
from torch import Tensor

from triton_side.blocks.cross_entropy import IGNORED


def rmsnorm(inputs: Mapping[str, Tensor], *, eps: float) -> dict[str, Tensor]:
    """x [rows, columns], weight [columns] -> y; at most 65,536 columns.

    Cast as Gemma does, float32 to the end (Llama's way, the default, rounds before the product with the weight). Not in
    place: that writes the gradient of x over that of y.
    """
    return {"y": LigerRMSNormFunction.apply(inputs["x"], inputs["weight"], eps, 0.0, "gemma", False)}


def layernorm(inputs: Mapping[str, Tensor], *, eps: float) -> dict[str, Tensor]:
    """x [rows, columns], weight, bias [columns] -> y, float32 inside; at most 65,536 columns."""
    return {"y": LigerLayerNormFunction.apply(inputs["x"], inputs["weight"], inputs["bias"], eps)}


def softmax(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """x [rows, columns] -> y, float32 inside; backward in x's dtype, its sum too. At most 65,536 columns."""
    return {"y": LigerSoftmaxFunction.apply(inputs["x"])}


def swiglu(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """gate, up [rows, columns] -> y; silu(gate) in float32, rounded before the product. Raises RuntimeError where a
    gradient would be asked for."""
    return {"y": LigerSiLUMulFunction.apply(*_gate_and_up(inputs))}


def geglu(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """gate, up [rows, columns] -> y; gelu(gate), tanh form, in float32, rounded before the product; raises as swiglu.
    """
    return {"y": LigerGELUMulFunction.apply(*_gate_and_up(inputs))}


def linear_cross_entropy(inputs: Mapping[str, Tensor], *, smoothing: float, z_loss: float) -> dict[str, Tensor]:
    """h [tokens, width], w [classes, width], labels [tokens] int32 -> loss [] in float32. PyTorch's products around one
    kernel, chunk by chunk of tokens; gradients, where they are asked for, are made in the forward pass.

    Waits for the GPU in every call, to count the labels and to compare the loss's gradient with 1. The gradient of w is
    added up in float32, as it can be told to: of 256 tokens in 128 chunks it erred 0.9 times twice what plain bfloat16
    did, and added up in bfloat16, the default, 1.4 times (0.8.5, in Triton's interpreter).
    """
    unused: tuple[None, None] = (None, None)  # bias, weights of classes
    loss, *_ = LigerFusedLinearCrossEntropyFunction.apply(
        inputs["h"], inputs["w"], inputs["labels"], *unused, IGNORED, z_loss, smoothing, "mean", None, False,
        torch.float32,
    )
    return {"loss": loss}


def _gate_and_up(inputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    gate, up = inputs["gate"], inputs["up"]
    if torch.is_grad_enabled() and (gate.requires_grad or up.requires_grad):
        raise RuntimeError("Liger's backward writes over gate and up; call it within torch.no_grad()")
    return gate, up
