"""A linear layer, forward and backward: y = x @ weight + bias.

    dx = dy weight^T    dweight = x^T dy    dbias = sum over rows of dy

The forward pass is one kernel with the bias in its epilogue. The backward pass is two products and another pass over
dy, which sums its columns: two kernels, or one for few rows. If one step of dweight's inner axis holds all rows, its
kernel sums them, too. For m = k = n = 8192 in 16-bit dtypes that pass reads 134 MB: 33 us at the 4.1 TB/s of an H200,
against 2.7 ms of products. No sum is atomic, so results repeat bit for bit on one GPU model.

Shapes: x [m, k], weight [k, n], bias [n], y [m, n]. dtypes: bfloat16, float16, float32, one for all. The sum and the
bias are float32. float32 products follow `torch.get_float32_matmul_precision()`. The forward pass saves x and
weight.
"""

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from xlafuse.triton_side.calls.declare import computing, forward, gradient
from xlafuse.triton_side.kernels.matmul import FEW_ROWS, choose_config, launch_matmul, matmul_config
from xlafuse.triton_side.kernels.shared.column_sums import partial_sums, sum_columns
from xlafuse.triton_side.kernels.shared.launch import check_matrix, check_tensors

FORWARD = (forward("dot", "product"), forward("add", "bias"))
PARTIAL_DBIAS = (gradient("reduce_sum", "bias", "partial"),)
DBIAS = (gradient("reduce_sum", "bias", "dbias"),)
DX = (gradient("dot", "product", "dx"),)
DWEIGHT = (gradient("dot", "product", "dweight"),)


def check_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> None:
    """Raise ValueError or TypeError unless x [m, k], weight [k, n] and bias [n] fit, on one GPU in one dtype."""
    check_tensors(x=x, weight=weight, bias=bias)
    check_matrix("x", x)
    check_matrix("weight", weight)
    if x.shape[1] != weight.shape[0] or bias.shape != weight.shape[1:]:
        raise ValueError(
            f"x [m, k], weight [k, n] and bias [n] must fit, got x {list(x.shape)}, weight {list(weight.shape)}, "
            f"bias {list(bias.shape)}; weights are [inputs, outputs], transpose a torch.nn.Linear's weight"
        )


def input_gradient(dy: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return dx = dy weight^T, for any dy [m, n]."""
    with computing(*DX, c_ptr="dx"):
        return launch_matmul(dy, weight.T, choose_config(matmul_config, dy, weight.T))


def weight_gradient(dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return dweight = x^T dy, for any dy [m, n]."""
    with computing(*DWEIGHT, c_ptr="dweight"):
        return launch_matmul(x.T, dy, choose_config(matmul_config, x.T, dy))


def weight_and_bias_gradients(dy: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return dweight and dbias, from one kernel if a step of the product holds all rows."""
    config = choose_config(matmul_config, x.T, dy)
    if len(dy) > config.block_k or not x.shape[1]:
        return weight_gradient(dy, x), bias_gradient(dy)
    dbias = torch.empty(dy.shape[1], dtype=dy.dtype, device=dy.device)
    with computing(*DWEIGHT, *DBIAS, c_ptr="dweight", b_sums_ptr="dbias"):
        return launch_matmul(x.T, dy, config, b_sums=dbias), dbias


def bias_gradient(dy: torch.Tensor) -> torch.Tensor:
    """Return dbias, the sum of dy's rows; one kernel sums few rows, two kernels many."""
    if len(dy) <= FEW_ROWS:
        with computing(*DBIAS, partial_ptr="dy", sum_ptr="dbias"):
            return sum_columns(dy.contiguous(), dy.dtype)
    with computing(*PARTIAL_DBIAS):
        partial = partial_sums(dy)
    with computing(*DBIAS, sum_ptr="dbias"):
        return sum_columns(partial, dy.dtype)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        with computing(*FORWARD, c_ptr="y"):
            return launch_matmul(x, weight, choose_config(matmul_config, x, weight), bias=bias.contiguous())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        return input_gradient(dy, weight), *weight_and_bias_gradients(dy, x)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Return x @ weight + bias, differentiable once.

    Args:
        x: [m, k], any strides.
        weight: [k, n], any strides.
        bias: [n].

    Returns:
        y [m, n], contiguous, in the inputs' dtype.

    Raises:
        ValueError: shapes do not fit, devices differ or are not a GPU (outside the interpreter), or float32 products
            are set to "medium".
        TypeError: a dtype is not supported, or they differ.
    """
    check_linear(x, weight, bias)
    return _Linear.apply(x, weight, bias)


def apply(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Run the block `linear`: x [m, k], weight [k, n], bias [n] -> y [m, n]."""
    return {"y": linear(**inputs)}
