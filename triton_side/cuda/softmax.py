"""Softmax over the last axis in CUDA C++ (softmax.cu), with its gradient.

    y  = exp(x - max(x)) / sum(exp(x - max(x)))
    dx = y (dy - sum(y dy))

The kernels compute in fp32 and store x's dtype. A row of only -inf becomes zeros and has zero gradients. A row that
holds NaN or +inf becomes NaN, as in torch.softmax. One reduction of (maximum, sum) pairs gives both values (Milakov
and Gimelshein, Online normalizer calculation for softmax, arXiv:1805.02867).

A row is read once, held in registers and written once, up to 131,072 columns of 16-bit dtypes (65,536 of fp32, and
65,536 of either in scalar loads). Longer rows are read twice. On GPUs without thread block clusters, so is every row
that is too long for one block.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from xlafuse.triton_side.calls.declare import declare_template
from xlafuse.triton_side.cuda.common import tensors
from xlafuse.triton_side.cuda.common.launch import launch
from xlafuse.triton_side.kernels.softmax import BACKWARD, FORWARD

WARP = 32
STREAMING_THREADS = 1024

for variant in ("", "_cluster", "_streaming"):
    declare_template(
        "softmax.cu", f"softmax_forward{variant}", *FORWARD, flops=lambda shapes: 5 * math.prod(shapes["y"])
    )
    declare_template(
        "softmax.cu", f"softmax_backward{variant}", *BACKWARD, flops=lambda shapes: 4 * math.prod(shapes["y"])
    )


@dataclass(frozen=True)
class Plan:
    """How a row is held: `vectors` packs in each of `threads` threads in each of `cluster` blocks, `rows` per block."""

    threads: int
    vectors: int
    cluster: int = 1
    rows: int = 1

    def columns(self, lanes: int) -> int:
        return self.threads * self.vectors * self.cluster * lanes


# Short rows take a warp each, four to a block. Longer ones take a block of at most 256 threads: several such blocks fit
# a multiprocessor, so one loads while another computes. Four packs per thread are the most that the backward kernel
# holds without spilling. Beyond 256 x 4 packs (8192 columns of bf16) a cluster of blocks shares the row.
VECTOR_PLANS = (
    *(Plan(WARP, vectors, rows=4) for vectors in (1, 2, 4)),
    *(Plan(threads, 4) for threads in (64, 128, 256)),
    *(Plan(256, 4, cluster) for cluster in (2, 4, 8)),
    Plan(512, 4, 8),
)
# In single elements a thread holds at most 16 (of 16 bits, half of the bytes), with 16 loads in flight.
SCALAR_PLANS = (
    *(Plan(WARP, vectors, rows=4) for vectors in (1, 4, 16)),
    *(Plan(threads, 16) for threads in (64, 128, 256, 512)),
    *(Plan(512, 16, cluster) for cluster in (2, 4, 8)),
)


def plan(columns: int, lanes: int, clusters: bool) -> Plan | None:
    """Return the smallest plan that holds `columns`, or None if the row is streamed.

    clusters: whether the GPU has thread block clusters.
    """
    for candidate in VECTOR_PLANS if lanes > 1 else SCALAR_PLANS:
        if candidate.columns(lanes) >= columns and (clusters or candidate.cluster == 1):
            return candidate
    return None


def _launch(name: str, inputs: tuple[torch.Tensor, ...], out: torch.Tensor) -> None:
    columns = out.shape[-1]
    if out.numel() == 0:
        return
    rows = out.numel() // columns
    lanes = tensors.lanes(*inputs, out, columns=columns)
    clusters = torch.cuda.get_device_capability(out.device) >= (9, 0)
    chosen = plan(columns, lanes, clusters)
    constants: tuple[int, ...]
    if chosen is None:
        name, constants = f"{name}_streaming", (lanes, STREAMING_THREADS)
        grid, block = rows, (STREAMING_THREADS, 1)
    elif chosen.cluster > 1:
        name, constants = f"{name}_cluster", (lanes, chosen.vectors, chosen.threads, chosen.cluster)
        grid, block = rows * chosen.cluster, (chosen.threads, 1)
    else:
        constants = (lanes, chosen.vectors, chosen.threads, chosen.rows)
        grid, block = -(-rows // chosen.rows), (chosen.threads, chosen.rows)
    # Flushing denormals to zero makes exp2 one instruction instead of four. A probability below 1e-38 becomes 0.
    launch(
        "softmax.cu", name, constants, grid, block, *inputs, out, ctypes.c_longlong(rows), columns,
        options=("--ftz=true",),
    )


class Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        y = torch.empty_like(x)
        _launch("softmax_forward", (x,), y)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
        (y,) = ctx.saved_tensors
        dx = torch.empty_like(y)
        _launch("softmax_backward", (y, dy.contiguous()), dx)
        return dx


def softmax(x: torch.Tensor) -> torch.Tensor:
    """Return the softmax over the last axis of a CUDA tensor of float32, float16 or bfloat16.

    A non-contiguous input is copied first.

    Raises:
        TypeError: another dtype.
        ValueError: not on a CUDA device, no axis, or more than 2**30 columns.
    """
    tensors.check_rows("softmax", x=x)
    return Softmax.apply(x)


def apply(inputs: Mapping[str, torch.Tensor], masked: int = 0) -> dict[str, torch.Tensor]:
    return {"y": softmax(inputs["x"])}
