"""out = x + y in CUDA C++ (vector_add.cu).

The canonical memory-bound kernel: one addition for two elements read and one written, 1/6 FLOP per byte in 16-bit
dtypes. It computes in fp32 and stores the inputs' dtype. Any shape works; a non-contiguous input is copied first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from xlafuse.triton_side.calls.declare import declare_template, forward
from xlafuse.triton_side.cuda.common import tensors
from xlafuse.triton_side.cuda.common.launch import launch_elementwise

declare_template("vector_add.cu", "vector_add", forward("add", "add"), flops=lambda shapes: math.prod(shapes["out"]))


class VectorAdd(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x, y = x.contiguous(), y.contiguous()
        out = torch.empty_like(x)
        launch_elementwise("vector_add.cu", "vector_add", (x, y), out)
        return out

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return dout, dout


def vector_add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return x + y for two CUDA tensors of one shape and one dtype (float32, float16, bfloat16).

    Raises:
        TypeError: another dtype, or two dtypes.
        ValueError: not on one CUDA device, or different shapes.
    """
    tensors.check("vector_add", x=x, y=y)
    return VectorAdd.apply(x, y)


def apply(inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {"out": vector_add(inputs["x"], inputs["y"])}
