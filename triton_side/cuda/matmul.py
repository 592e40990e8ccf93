"""The matrix product c = a @ b in CUDA C++ (matmul.cu), forward and backward: da = dc b^T, db = a^T dc.

The classical kernel, to be read (CUDA C++ Programming Guide, "Shared Memory"): blocks bring tiles of both operands into
shared memory, threads keep 8 x 8 sums in registers. A transposed operand is one with other strides, so that one kernel
makes all three products. float32, float16 and bfloat16 in and out; multiplied and summed in fp32, the inner axis term
after term.

What it lacks: tensor cores above all, which have 989 TFLOP/s for 16-bit dtypes on an H200, where the CUDA cores have 67
in fp32; then copies that go on while it computes (cp.async or TMA, with several tiles in flight), 16-byte loads, and a
split of the inner axis for small outputs. Of the 1240 (float32) to 1460 (bfloat16) instructions of its loop 1024 are
multiply-adds, and what a block waits for its next tiles, nothing hides but the other block on the multiprocessor. To be
expected is half of the CUDA cores' peak to two thirds: 35 to 45 TFLOP/s, 4 to 5% of the tensor cores' in bfloat16.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

import torch

from triton_side.calls import cuda_program
from triton_side.calls.declare import Shapes, computing, declare_template, forward, gradient
from triton_side.cuda import tensors

TILE = 128  # rows and columns of c for a block: 64 sums a thread, 100 to 128 registers
DEPTH = 16  # terms of the inner axis at a time
THREADS = 256


def _flops(shapes: Shapes) -> float:
    (m, k), n = shapes["a"], shapes["b"][1]
    return 2 * m * n * k


declare_template("matmul.cu", "matmul", flops=_flops)  # of what, the caller says


def expression(dtype: torch.dtype, a_inner_first: bool, b_inner_first: bool) -> str:
    """The instance of the template."""
    first = ", ".join(str(flag).lower() for flag in (a_inner_first, b_inner_first))
    return f"matmul<{tensors.CPP_TYPES[dtype]}, {first}, {TILE}, {DEPTH}>"


def _launch(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a @ b, contiguous."""
    (m, k), n = a.shape, b.shape[1]
    c = torch.empty((m, n), dtype=a.dtype, device=a.device)
    if c.numel() == 0:
        return c
    # Of two axes that are both far apart in memory, either may come first.
    instance = expression(a.dtype, a.stride(0) != 1, b.stride(1) != 1)
    kernel = cuda_program.compile_kernel("matmul.cu", instance, cuda_program.device_arch(a.device))
    tiles = -(-m // TILE) * -(-n // TILE)
    scalars = [ctypes.c_longlong(value) for value in (m, n, k, *a.stride(), *b.stride())]
    cuda_program.launch(kernel, tiles, (THREADS, 1), (a, b, c, *scalars), a.device)
    return c


class Matmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(a, b)
        with computing(forward("dot", "product"), c="c"):
            return _launch(a, b)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dc: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a, b = ctx.saved_tensors
        with computing(gradient("dot", "product", "da"), c="da"):
            da = _launch(dc, b.T)
        with computing(gradient("dot", "product", "db"), c="db"):
            db = _launch(a.T, dc)
        return da, db


def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a @ b for two CUDA matrices [m, k] and [k, n] of one dtype (float32, float16, bfloat16), with any strides.

    Raises:
        TypeError: another dtype, or two dtypes.
        ValueError: not on one CUDA device, or shapes that do not fit.
    """
    tensors.check_dtype_and_device("matmul", a=a, b=b)
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[0]:
        raise ValueError(f"matmul: a [m, k] and b [k, n] must fit, got a {tuple(a.shape)}, b {tuple(b.shape)}")
    return Matmul.apply(a, b)


def apply(inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {"c": matmul(inputs["a"], inputs["b"])}
