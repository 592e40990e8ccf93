"""GELU (tanh form) of a matrix plus a bias, in CUDA C++ (bias_gelu.cu), with its gradients.

    y  = gelu(z),  z = x + bias
    dx = dy gelu'(z)          dbias = sum over rows of dx

x, y [rows, columns], bias [columns]. The kernels compute in fp32 with the formulas of include/gelu.cuh and store x's
dtype. The backward pass reads x and dy once. Each of its blocks writes a row of fp32 partial sums of dbias, and a
second kernel adds these up.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping
from typing import Any

import torch

from xlafuse.triton_side.calls.declare import declare_template
from xlafuse.triton_side.cuda.common import tensors
from xlafuse.triton_side.cuda.common.launch import launch
from xlafuse.triton_side.kernels.bias_gelu import BACKWARD, DBIAS, FORWARD

THREADS = 128
# 16-byte loads in flight per thread and matrix. In the backward kernel a multiprocessor of 1024 threads then has
# 128 KiB of reads in flight, as in the elementwise kernels.
FORWARD_ROWS = 2
BACKWARD_ROWS = 4
SCALAR_ROWS = 8  # loads in flight where each is of a single element
RESIDENT = 8  # blocks of the backward kernel on a multiprocessor: 1024 threads of 64 registers
WARP = 32
SUM_WARPS = 32  # in a block that adds up partial sums

declare_template("bias_gelu.cu", "bias_gelu_forward", *FORWARD, flops=lambda shapes: 10 * math.prod(shapes["x"]))
declare_template("bias_gelu.cu", "bias_gelu_backward", *BACKWARD, flops=lambda shapes: 19 * math.prod(shapes["x"]))
declare_template("bias_gelu.cu", "bias_gelu_sum_partials", DBIAS, flops=lambda shapes: math.prod(shapes["partial"]))


def _tiling(vector_rows: int, x: torch.Tensor, *others: torch.Tensor) -> tuple[int, int, int, int]:
    """Return elements per load, rows per tile, and the number of tiles down and across x.

    vector_rows: rows per tile where loads take 16 bytes.
    """
    rows, columns = x.shape
    lanes = tensors.lanes(x, *others, columns=columns)
    tile_rows = vector_rows if lanes > 1 else SCALAR_ROWS
    return lanes, tile_rows, -(-rows // tile_rows), -(-columns // (THREADS * lanes))


class BiasGelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        x, bias = x.contiguous(), bias.contiguous()
        ctx.save_for_backward(x, bias)
        y = torch.empty_like(x)
        if y.numel() == 0:
            return y
        lanes, tile_rows, down, across = _tiling(FORWARD_ROWS, x, bias, y)
        launch(
            "bias_gelu.cu", "bias_gelu_forward", (lanes, tile_rows, THREADS), across * down, (THREADS, 1),
            x, bias, y, ctypes.c_longlong(x.shape[0]), x.shape[1],
        )
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, bias = ctx.saved_tensors
        dy, dx = dy.contiguous(), torch.empty_like(x)
        if dx.numel() == 0:
            return dx, torch.zeros_like(bias)
        rows, columns = x.shape
        lanes, tile_rows, down, across = _tiling(BACKWARD_ROWS, x, bias, dy, dx)
        resident = RESIDENT * torch.cuda.get_device_properties(x.device).multi_processor_count
        groups = min(down, max(1, resident // across))
        partial = torch.empty((groups, columns), dtype=torch.float32, device=x.device)
        launch(
            "bias_gelu.cu", "bias_gelu_backward", (lanes, tile_rows, THREADS), across * groups, (THREADS, 1),
            x, bias, dy, dx, partial, ctypes.c_longlong(rows), columns,
        )
        dbias = torch.empty_like(bias)
        launch(
            "bias_gelu.cu", "bias_gelu_sum_partials", (SUM_WARPS,), -(-columns // WARP), (WARP, SUM_WARPS),
            partial, dbias, groups, columns, element=x.dtype,
        )
        return dx, dbias


def bias_gelu(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Return gelu(x + bias), tanh form, of CUDA tensors x [rows, columns] and bias [columns].

    Both are float32, float16 or bfloat16. A non-contiguous tensor is copied first.

    Raises:
        TypeError: another dtype, or two dtypes.
        ValueError: not on one CUDA device, x is no matrix, bias does not fit, or more than 2**30 columns.
    """
    tensors.check_rows("bias_gelu", x=x)
    if x.ndim != 2:
        raise ValueError(f"bias_gelu: x must be [rows, columns], got {tuple(x.shape)}")
    tensors.check_vectors("bias_gelu", x, bias=bias)
    return BiasGelu.apply(x, bias)


def apply(inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {"y": bias_gelu(inputs["x"], inputs["bias"])}
