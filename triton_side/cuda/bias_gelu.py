"""GELU (tanh form) of a matrix to whose rows a bias is added, in CUDA C++ (bias_gelu.cu), with its gradients.

    y  = gelu(z),  z = x + bias
    dx = dy gelu'(z)          dbias = sum over rows of dx

x, y [rows, columns], bias [columns]. Computed in fp32 with the formulas of gelu.cuh, stored in x's dtype. The backward
pass reads x and dy once; each of its blocks leaves a row of fp32 partial sums, which a second kernel adds up.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping
from typing import Any

import torch

from triton_side.calls import cuda_program
from triton_side.calls.declare import again, declare_template, forward, gradient
from triton_side.cuda import gelu, tensors

THREADS = 128
# 16-byte loads in flight per thread and matrix. With those of the backward kernel a multiprocessor of 1024 threads has
# 128 KiB of reads in flight, as the elementwise kernels have.
FORWARD_ROWS = 2
BACKWARD_ROWS = 4
SCALAR_ROWS = 8  # where the loads are of single elements
RESIDENT = 8  # blocks of the backward kernel to a multiprocessor: 1024 threads of 64 registers
WARP = 32
SUM_ROWS = 32  # of a warp each, in a block that adds up partial sums

declare_template(
    "bias_gelu.cu", "bias_gelu_forward", forward("add", "bias"), *gelu.FORWARD,
    flops=lambda shapes: 10 * math.prod(shapes["x"]),
)
declare_template(
    "bias_gelu.cu", "bias_gelu_backward",
    again("add", "bias"), *gelu.BACKWARD, gradient("reduce_sum", "bias", "partial"),
    flops=lambda shapes: 19 * math.prod(shapes["x"]),
)
declare_template(
    "bias_gelu.cu", "bias_gelu_sum_partials", gradient("reduce_sum", "bias", "dbias"),
    flops=lambda shapes: math.prod(shapes["partial"]),
)


def _tiling(vector_rows: int, x: torch.Tensor, *others: torch.Tensor) -> tuple[int, int, int, int]:
    """Elements to a load, rows of a tile (`vector_rows` where loads are of 16 bytes), and tiles down and across x."""
    rows, columns = x.shape
    lanes = tensors.lanes(x, *others, columns=columns)
    tile_rows = vector_rows if lanes > 1 else SCALAR_ROWS
    return lanes, tile_rows, -(-rows // tile_rows), -(-columns // (THREADS * lanes))


def _compiled(name: str, x: torch.Tensor, *constants: int) -> cuda_program.Kernel:
    template = ", ".join(map(str, (tensors.CPP_TYPES[x.dtype], *constants)))
    return cuda_program.compile_kernel("bias_gelu.cu", f"{name}<{template}>", cuda_program.device_arch(x.device))


class BiasGelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        x, bias = x.contiguous(), bias.contiguous()
        ctx.save_for_backward(x, bias)
        y = torch.empty_like(x)
        if y.numel() == 0:
            return y
        lanes, tile_rows, down, across = _tiling(FORWARD_ROWS, x, bias, y)
        kernel = _compiled("bias_gelu_forward", x, lanes, tile_rows, THREADS)
        arguments = (x, bias, y, ctypes.c_longlong(x.shape[0]), ctypes.c_int(x.shape[1]))
        cuda_program.launch(kernel, across * down, (THREADS, 1), arguments, x.device)
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
        sharers = min(down, max(1, resident // across))
        partial = torch.empty((sharers, columns), dtype=torch.float32, device=x.device)
        kernel = _compiled("bias_gelu_backward", x, lanes, tile_rows, THREADS)
        matrix_arguments = (x, bias, dy, dx, partial, ctypes.c_longlong(rows), ctypes.c_int(columns))
        cuda_program.launch(kernel, across * sharers, (THREADS, 1), matrix_arguments, x.device)

        dbias = torch.empty_like(bias)
        kernel = _compiled("bias_gelu_sum_partials", x, SUM_ROWS)
        sum_arguments = (partial, dbias, ctypes.c_int(sharers), ctypes.c_int(columns))
        cuda_program.launch(kernel, -(-columns // WARP), (WARP, SUM_ROWS), sum_arguments, x.device)
        return dx, dbias


def bias_gelu(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """gelu(x + bias), tanh form, of a CUDA tensor x [rows, columns] and bias [columns], both float32, float16 or
    bfloat16. A non-contiguous one is copied first.

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
