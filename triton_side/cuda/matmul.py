"""The matrix product c = a @ b in CUDA C++ (matmul.cu), forward and backward: da = dc b^T, db = a^T dc.

This is the classical tiled kernel (CUDA C++ Programming Guide, "Shared Memory"), written to be read. Each block copies
tiles of both operands to shared memory, and each thread keeps 8 x 8 sums in registers. A transposed operand differs
only in its strides, so one kernel computes all three products. Inputs and outputs are float32, float16 or bfloat16. The
kernel multiplies and adds in fp32, term by term along the inner axis.

It lacks, in order of importance:
- tensor cores: 989 TFLOP/s for 16-bit dtypes on an H200, against 67 TFLOP/s of the CUDA cores in fp32;
- copies that overlap with computation (cp.async or TMA, with several tiles in flight);
- 16-byte loads;
- a split of the inner axis for small outputs.

The loop has 1240 (float32) to 1460 (bfloat16) instructions, of which 1024 are multiply-adds. A multiprocessor
holds two blocks. While one waits for its next tiles, only the other can compute. Expect half to two thirds of the CUDA
cores' peak: 35 to 45 TFLOP/s, which is 4 to 5% of the tensor cores' peak in bfloat16.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

import torch

from xlafuse.triton_side.calls.declare import Shapes, computing, declare_template, forward, gradient
from xlafuse.triton_side.cuda.common import tensors
from xlafuse.triton_side.cuda.common.launch import launch

TILE = 128  # rows and columns of c per block: 64 sums a thread, 100 to 128 registers
DEPTH = 16  # terms of the inner axis per step
THREADS = 256


def _flops(shapes: Shapes) -> float:
    (m, k), n = shapes["a"], shapes["b"][1]
    return 2 * m * n * k


declare_template("matmul.cu", "matmul", flops=_flops)  # each caller declares its operations by `computing`


def constants(a_inner_first: bool, b_inner_first: bool) -> tuple[int | str, ...]:
    """Return the template's arguments after the element type.

    The flags are for `fill` in matmul.cu: if one is true, consecutive threads read its operand along the inner axis.
    """
    return (*(str(flag).lower() for flag in (a_inner_first, b_inner_first)), TILE, DEPTH)


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return a @ b as a contiguous tensor."""
    (m, k), n = a.shape, b.shape[1]
    c = torch.empty((m, n), dtype=a.dtype, device=a.device)
    if c.numel() == 0:
        return c
    tiles = -(-m // TILE) * -(-n // TILE)
    scalars = [ctypes.c_longlong(value) for value in (m, n, k, *a.stride(), *b.stride())]
    # Consecutive threads read the contiguous axis. If an operand has none, either order works.
    order = constants(a.stride(0) != 1, b.stride(1) != 1)
    launch("matmul.cu", "matmul", order, tiles, (THREADS, 1), a, b, c, *scalars)
    return c


class Matmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(a, b)
        with computing(forward("dot", "product"), c="c"):
            return _product(a, b)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dc: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a, b = ctx.saved_tensors
        with computing(gradient("dot", "product", "da"), c="da"):
            da = _product(dc, b.T)
        with computing(gradient("dot", "product", "db"), c="db"):
            db = _product(a.T, dc)
        return da, db


def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return a @ b for two CUDA matrices [m, k] and [k, n] of one dtype (float32, float16, bfloat16), with any strides.

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
