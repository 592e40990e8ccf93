"""LayerNorm over the last axis in CUDA C++ (layernorm.cu), with its gradients.

    y  = n w + b,  n = (x - mean(x)) rstd,  rstd = 1 / sqrt(mean((x - mean(x))^2) + eps)

    dx = rstd (g - mean(g) - n mean(g n)),  g = dy w       dw = sum of dy n       db = sum of dy

Source: Ba, Kiros and Hinton, Layer Normalization (arXiv:1607.06450). The kernels compute in fp32 and store x's dtype.
If a backward pass will follow, the forward pass saves mean and rstd: 8 bytes a row.

A row is read once, held in registers and written once, up to 16,384 columns of 16-bit dtypes (8192 of fp32, and in
scalar loads). Longer rows are read twice, and a third time for dw and db. Each block writes one row of fp32 partial
sums of dw and one of db; a second kernel adds these up.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from xlafuse.triton_side.calls.declare import declare_template
from xlafuse.triton_side.cuda.common import tensors
from xlafuse.triton_side.cuda.common.launch import launch
from xlafuse.triton_side.kernels.layernorm import DX, FORWARD, NORMALIZED_AGAIN, PARTIALS, SUMS

STREAMING_THREADS = 512
PARTIALS_THREADS = 128
SUM_WARPS = 16
RESIDENT_THREADS = 1024  # on a multiprocessor, for kernels with up to 64 registers a thread
# Each block costs two rows of partial sums, so it takes at least 8 rows unless a multiprocessor would then be idle.
ROWS_PER_BLOCK = 8

for variant in ("", "_streaming"):
    declare_template(
        "layernorm.cu", f"layernorm_forward{variant}", *FORWARD, flops=lambda shapes: 7 * math.prod(shapes["x"])
    )
declare_template(
    "layernorm.cu", "layernorm_backward", *NORMALIZED_AGAIN, *DX, *PARTIALS,
    flops=lambda shapes: 13 * math.prod(shapes["x"]),
)
declare_template(
    "layernorm.cu", "layernorm_backward_streaming", *NORMALIZED_AGAIN, *DX,
    flops=lambda shapes: 10 * math.prod(shapes["x"]),
)
declare_template(
    "layernorm.cu", "layernorm_partials", *NORMALIZED_AGAIN, *PARTIALS, flops=lambda shapes: 5 * math.prod(shapes["x"])
)
declare_template(
    "layernorm.cu", "layernorm_sum_partials", *SUMS, flops=lambda shapes: math.prod(shapes["partial"]),
)


@dataclass(frozen=True)
class Plan:
    """How a row is held: `vectors` packs in each of a block's `threads` threads."""

    threads: int
    vectors: int

    def columns(self, lanes: int) -> int:
        return self.threads * self.vectors * lanes

    def resident(self, lanes: int) -> int:
        """Return how many blocks of the backward kernel a multiprocessor runs at once.

        A thread keeps two fp32 sums for each of its elements: 64 registers at 8 elements, up to 128 at more.
        """
        return (RESIDENT_THREADS if self.vectors * lanes <= 8 else RESIDENT_THREADS // 2) // self.threads


# One pack per thread up to 512 threads, then several packs. With the sums for dw and db, the backward kernel would
# spill above four packs of 16 bytes.
VECTOR_PLANS = (*(Plan(threads, 1) for threads in (32, 64, 128, 256, 512)), Plan(512, 2), Plan(512, 4))
SCALAR_PLANS = (*(Plan(threads, 4) for threads in (32, 64, 128, 256, 512)), Plan(512, 8), Plan(512, 16))


def plan(columns: int, lanes: int) -> Plan | None:
    """Return the smallest plan that holds `columns`, or None if the row is streamed."""
    plans = VECTOR_PLANS if lanes > 1 else SCALAR_PLANS
    return next((candidate for candidate in plans if candidate.columns(lanes) >= columns), None)


def row_groups(rows: int, resident: int, multiprocessors: int) -> int:
    """Return into how many groups a backward pass divides the rows: one group per block or cluster.

    resident: blocks or clusters that the GPU runs at once.
    """
    return min(rows, resident, max(multiprocessors, rows // ROWS_PER_BLOCK))


def forward_pass(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float, save: bool
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Return y, and with `save` each row's mean and rstd in fp32, else None. All inputs are contiguous."""
    y = torch.empty_like(x)
    columns = x.shape[-1]
    rows = x.numel() // max(columns, 1)
    mean, rstd = (torch.empty(rows, dtype=torch.float32, device=x.device) if save else None for _ in range(2))
    if x.numel() == 0:
        return y, mean, rstd
    launch_norm_forward("layernorm.cu", (x, weight, bias), y, (mean, rstd), eps)
    return y, mean, rstd


def backward_pass(
    x: torch.Tensor, weight: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor, dy: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return dx, dweight and dbias. All inputs are contiguous."""
    dx = torch.empty_like(x)
    if x.numel() == 0:
        return dx, torch.zeros_like(weight), torch.zeros_like(weight)
    dweight, dbias = torch.empty_like(weight), torch.empty_like(weight)
    launch_norm_backward("layernorm.cu", x, weight, (mean, rstd), dy, dx, (dweight, dbias))
    return dx, dweight, dbias


def launch_norm_forward(
    source: str, inputs: tuple[torch.Tensor, ...], y: torch.Tensor, statistics: tuple[torch.Tensor | None, ...],
    eps: float,
) -> None:
    """Launch a kernel of a norm that writes y and the statistics. inputs: x, which is not empty, and vectors."""
    norm, columns = source.removesuffix(".cu"), y.shape[-1]
    lanes = tensors.lanes(*inputs, y, columns=columns)
    chosen = plan(columns, lanes)
    constants: tuple[int, ...]
    if chosen is None:
        name, constants = f"{norm}_forward_streaming", (lanes, STREAMING_THREADS)
    else:
        name, constants = f"{norm}_forward", (lanes, chosen.vectors, chosen.threads)
    launch(
        source, name, constants, y.numel() // columns, (constants[-1], 1),
        *inputs, y, *statistics, columns, float(eps),
    )


def launch_norm_backward(
    source: str, x: torch.Tensor, weight: torch.Tensor, statistics: tuple[torch.Tensor, ...], dy: torch.Tensor,
    dx: torch.Tensor, of_vectors: tuple[torch.Tensor, ...],
) -> None:
    """Launch the kernels of a norm's source that write dx and the gradients `of_vectors`, weight's first."""
    norm, columns = source.removesuffix(".cu"), x.shape[-1]
    rows = x.numel() // columns
    lanes = tensors.lanes(x, weight, dy, dx, columns=columns)
    chosen = plan(columns, lanes)
    multiprocessors = torch.cuda.get_device_properties(x.device).multi_processor_count
    tiles = -(-columns // (PARTIALS_THREADS * lanes))
    if chosen is None:
        blocks = multiprocessors * RESIDENT_THREADS // PARTIALS_THREADS
        partials = max(1, min(rows // ROWS_PER_BLOCK, blocks // tiles))
    else:
        partials = row_groups(rows, multiprocessors * chosen.resident(lanes), multiprocessors)
    vectors = len(of_vectors)
    partial = torch.empty((vectors, partials, columns), dtype=torch.float32, device=x.device).squeeze(0)
    if chosen is None:
        launch(
            source, f"{norm}_backward_streaming", (lanes, STREAMING_THREADS), rows, (STREAMING_THREADS, 1),
            x, weight, *statistics, dy, dx, columns,
        )
        launch(
            source, f"{norm}_partials", (lanes, PARTIALS_THREADS), tiles * partials, (PARTIALS_THREADS, 1),
            x, *statistics, dy, partial, partials, rows, columns,
        )
    else:
        launch(
            source, f"{norm}_backward", (lanes, chosen.vectors, chosen.threads), partials, (chosen.threads, 1),
            x, weight, *statistics, dy, dx, partial, rows, columns,
        )
    launch(
        source, f"{norm}_sum_partials", (SUM_WARPS,), vectors * -(-columns // 32), (32, SUM_WARPS),
        partial, *of_vectors, partials, columns, element=weight.dtype,
    )


class LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
        y, mean, rstd = forward_pass(x, weight, bias, eps, save=True)
        ctx.save_for_backward(x, weight, mean, rstd)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None]:
        x, weight, mean, rstd = ctx.saved_tensors
        dx, dweight, dbias = backward_pass(x, weight, mean, rstd, dy.contiguous())
        return dx, dweight, dbias, None


def layernorm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    """Return (x - mean(x)) / sqrt(var(x) + eps) * weight + bias over the last axis of a CUDA tensor.

    All three are float32, float16 or bfloat16; weight and bias have one element for each column. Non-contiguous inputs
    are copied first.

    Raises:
        TypeError: another dtype, or several.
        ValueError: not on one CUDA device, no axis, more than 2**30 columns, or another shape of weight or bias.
    """
    tensors.check_rows("layernorm", x=x)
    tensors.check_vectors("layernorm", x, weight=weight, bias=bias)
    training = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (x, weight, bias))
    x, weight, bias = x.contiguous(), weight.contiguous(), bias.contiguous()
    if training:
        return LayerNorm.apply(x, weight, bias, eps)
    y, _, _ = forward_pass(x, weight, bias, eps, save=False)
    return y


def apply(inputs: Mapping[str, torch.Tensor], *, eps: float) -> dict[str, torch.Tensor]:
    return {"y": layernorm(inputs["x"], inputs["weight"], inputs["bias"], eps)}
