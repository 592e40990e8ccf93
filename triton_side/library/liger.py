"""Liger's Triton kernels (liger-kernel, https://github.com/linkedin/Liger-Kernel), an optional package.

The notes below follow version 0.8.5. This module imports the autograd functions from the modules that define them,
because `liger_kernel.ops` may replace them depending on device or environment.

swiglu and geglu are used for inference only, because Liger writes their gradients over gate and up. These kernels of
Liger are not used:

- cross_entropy: the forward pass overwrites the logits with their gradient (zeros for ignored labels even without
  gradients), and the loss has the logits' dtype.
- rope: rotates q and k in place. It copies them first in some layouts, but not if heads or sequence have length one.
- swiglu_mlp: its weights have the layout of torch.nn.Linear, [out, in], so every call would copy ours.
- moe: it takes an expert's gate and up as one matrix, so every call would copy ours into one.
- embedding: experimental; it sums the table's gradient with atomics, in the table's dtype.
- dropout_residual_norm: it adds a residual before RMSNorm only, and has no dropout.
- attention: only other kinds (neighborhood, multi-token).
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

from xlafuse.triton_side.blocks.cross_entropy import IGNORED


def rmsnorm(inputs: Mapping[str, Tensor], *, eps: float) -> dict[str, Tensor]:
    """x [rows, columns], weight [columns] -> y; at most 65,536 columns.

    It casts as Gemma does: float32 to the end. Llama's way, the default, rounds before the product with the weight. The
    in-place option is off, because it writes the gradient of x over that of y.
    """
    return {"y": LigerRMSNormFunction.apply(inputs["x"], inputs["weight"], eps, 0.0, "gemma", False)}


def layernorm(inputs: Mapping[str, Tensor], *, eps: float) -> dict[str, Tensor]:
    """x [rows, columns], weight, bias [columns] -> y, float32 inside; at most 65,536 columns."""
    return {"y": LigerLayerNormFunction.apply(inputs["x"], inputs["weight"], inputs["bias"], eps)}


def softmax(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """x [rows, columns] -> y, float32 inside. Backward, its sum included, is in x's dtype. At most 65,536 columns."""
    return {"y": LigerSoftmaxFunction.apply(inputs["x"])}


def swiglu(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """gate, up [rows, columns] -> y; silu(gate) is in float32, rounded before the product.

    Raises RuntimeError if gate or up requires grad.
    """
    return {"y": LigerSiLUMulFunction.apply(*_gate_and_up(inputs))}


def geglu(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """gate, up [rows, columns] -> y; gelu(gate), tanh form, is in float32, rounded before the product.

    Raises RuntimeError if gate or up requires grad.
    """
    return {"y": LigerGELUMulFunction.apply(*_gate_and_up(inputs))}


def linear_cross_entropy(inputs: Mapping[str, Tensor], *, smoothing: float, z_loss: float) -> dict[str, Tensor]:
    """h [tokens, width], w [classes, width], labels [tokens] int32 -> loss [] in float32.

    For each chunk of tokens it runs PyTorch's products and one kernel. If gradients are needed, the forward pass
    computes them. Every call waits for the GPU, to count the labels and to compare the loss's gradient with 1.

    The gradient of w is summed in float32, which is an option. With 256 tokens in 128 chunks, its error was then 0.9
    times the tolerance (twice plain bfloat16's error); summed in bfloat16, the default, 1.4 times (0.8.5, in Triton's
    interpreter).
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
        raise RuntimeError("Liger's backward overwrites gate and up; call it within torch.no_grad()")
    return gate, up
