"""Bias, dropout, residual sum and layer norm in CUDA C++ (dropout_residual_norm.cu), with their gradients.

    h  = residual + m (x + bias),  m = scale where kept, else 0       mean, rstd = 1 / sqrt(var + eps) of the row of h
    y  = n weight + shift,  n = (h - mean) rstd

    dh_total = dh + rstd (g - mean(g) - n mean(g n)),  g = dy weight;  dh: the gradient of the output h

    dresidual = dh_total,  dx = m dh_total
    dbias = sum over rows of dx,  dweight = sum over rows of dy n,  dshift = sum over rows of dy

A GPT-2 layer does this between two matrix products. Sources: Srivastava et al., Dropout (JMLR 15, 2014); Ba, Kiros and
Hinton, Layer Normalization (arXiv:1607.06450). Matrices are [rows, columns]; bias, weight and shift [columns]; seed [2]
in int32.

The kernels compute in fp32 and store x's dtype. h is rounded once, and the norm uses the rounded h, which the backward
pass reads again. The backward pass draws the mask again (include/threefry.cuh). If a backward pass will follow, the
forward pass saves mean and rstd: 8 bytes a row.

A row is read once, held in registers and written once by one block. In the backward pass a cluster of two blocks shares
a row of more than 8192 columns. Each block or cluster writes three rows of fp32 partial sums, of dbias, dweight and
dshift; a second kernel adds these up.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from xlafuse.triton_side.blocks.dropout_residual_norm import check_dropout, dropout_constants
from xlafuse.triton_side.calls.declare import declare_template
from xlafuse.triton_side.cuda import layernorm
from xlafuse.triton_side.cuda.common import tensors
from xlafuse.triton_side.cuda.common.launch import launch
from xlafuse.triton_side.kernels.dropout_residual_norm import BACKWARD, FORWARD, SUMS

SUM_WARPS = 16

declare_template(
    "dropout_residual_norm.cu", "dropout_residual_norm_forward", *FORWARD,
    flops=lambda shapes: 10 * math.prod(shapes["x"]),
)
for variant in ("", "_cluster"):
    declare_template(
        "dropout_residual_norm.cu", f"dropout_residual_norm_backward{variant}", *BACKWARD,
        flops=lambda shapes: 15 * math.prod(shapes["h"]),
    )
declare_template(
    "dropout_residual_norm.cu", "dropout_residual_norm_sum_partials", *SUMS,
    flops=lambda shapes: math.prod(shapes["partial"]),
)


@dataclass(frozen=True)
class Plan:
    """How a row is held: `elements` in each of `threads` threads in each of `cluster` blocks.

    `elements` is a multiple of the elements per load.
    """

    threads: int
    elements: int
    cluster: int = 1

    @property
    def columns(self) -> int:
        return self.threads * self.elements * self.cluster

    def resident(self, lanes: int) -> int:
        """Return how many blocks of the backward kernel a multiprocessor runs at once.

        For each element a thread keeps three fp32 sums and reads three matrices: 64 registers for eight elements of 16
        bits, else up to 128.
        """
        return (1024 if self.elements == lanes else 512) // self.threads


# Registers decide how many loads are in flight. At 4096 columns of 16 bits, six forward blocks of 256 threads and 40
# registers fit a multiprocessor, with 64 bytes in flight per thread; two backward blocks of 512 threads and 64
# registers do, with 48 bytes.
FORWARD_PLANS = (*(Plan(threads, 8) for threads in (32, 64, 128)), *(Plan(t, 16) for t in (128, 256, 512)),
                 Plan(512, 32))
BACKWARD_PLANS = (*(Plan(threads, 8) for threads in (32, 64, 128, 256, 512)), Plan(512, 16), Plan(512, 16, cluster=2))


def plan(columns: int, plans: tuple[Plan, ...]) -> Plan:
    """Return the smallest of `plans` that holds `columns`."""
    return next(candidate for candidate in plans if candidate.columns >= columns)


def most_columns(device: torch.device) -> int:
    """Return how many columns a row may have. Before Hopper, without clusters, one block must hold the row."""
    clusters = torch.cuda.get_device_capability(device) >= (9, 0)
    return max(candidate.columns for candidate in BACKWARD_PLANS if clusters or candidate.cluster == 1)


def forward_pass(
    x: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, shift: torch.Tensor,
    seed: torch.Tensor, p: float, eps: float, save: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Return y and h, and with `save` each row's mean and rstd in fp32, else None. All inputs are contiguous."""
    y, h = torch.empty_like(x), torch.empty_like(x)
    rows, columns = x.shape
    mean, rstd = (torch.empty(rows, dtype=torch.float32, device=x.device) if save else None for _ in range(2))
    if x.numel() == 0:
        return y, h, mean, rstd
    lanes = tensors.lanes(x, bias, residual, weight, shift, y, h, columns=columns)
    chosen = plan(columns, FORWARD_PLANS)
    launch(
        "dropout_residual_norm.cu", "dropout_residual_norm_forward", (lanes, chosen.elements // lanes, chosen.threads),
        rows, (chosen.threads, 1), x, bias, residual, weight, shift, seed, y, h, mean, rstd, columns,
        *dropout_constants(p), float(eps),
    )
    return y, h, mean, rstd


def backward_pass(
    h: torch.Tensor, weight: torch.Tensor, seed: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor,
    dy: torch.Tensor, dh: torch.Tensor, p: float,
) -> tuple[torch.Tensor, ...]:
    """Return dx, dbias, dresidual, dweight and dshift. All inputs are contiguous."""
    dx, dresidual = torch.empty_like(h), torch.empty_like(h)
    if h.numel() == 0:
        dbias, dweight, dshift = (torch.zeros_like(weight) for _ in range(3))
        return dx, dbias, dresidual, dweight, dshift
    dbias, dweight, dshift = (torch.empty_like(weight) for _ in range(3))
    rows, columns = h.shape
    lanes = tensors.lanes(h, weight, dy, dh, dx, dresidual, columns=columns)
    chosen = plan(columns, BACKWARD_PLANS)
    multiprocessors = torch.cuda.get_device_properties(h.device).multi_processor_count
    resident = chosen.resident(lanes)
    partials = layernorm.row_groups(rows, multiprocessors * resident // chosen.cluster, multiprocessors)
    partial = torch.empty((3, partials, columns), dtype=torch.float32, device=h.device)
    name, last = ("backward", resident) if chosen.cluster == 1 else ("backward_cluster", chosen.cluster)
    launch(
        "dropout_residual_norm.cu", f"dropout_residual_norm_{name}",
        (lanes, chosen.elements // lanes, chosen.threads, last), partials * chosen.cluster, (chosen.threads, 1),
        h, weight, seed, mean, rstd, dy, dh, dx, dresidual, partial, rows, columns, *dropout_constants(p),
    )
    launch(
        "dropout_residual_norm.cu", "dropout_residual_norm_sum_partials", (SUM_WARPS,), 3 * -(-columns // 32),
        (32, SUM_WARPS), partial, dbias, dweight, dshift, partials, columns, element=weight.dtype,
    )
    return dx, dbias, dresidual, dweight, dshift


class DropoutResidualNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor,
        shift: torch.Tensor, seed: torch.Tensor, p: float, eps: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        y, h, mean, rstd = forward_pass(x, bias, residual, weight, shift, seed, p, eps, save=True)
        ctx.save_for_backward(h, weight, seed, mean, rstd)
        ctx.p = p
        return y, h

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: torch.Tensor, dh: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        h, weight, seed, mean, rstd = ctx.saved_tensors
        gradients = backward_pass(h, weight, seed, mean, rstd, dy.contiguous(), dh.contiguous(), ctx.p)
        return *gradients, None, None, None


def dropout_residual_norm(
    x: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, shift: torch.Tensor,
    seed: torch.Tensor, *, p: float, eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (y, h) with h = residual + dropout(x + bias) and y = layer_norm(h) weight + shift over the columns.

    The CUDA tensors are float32, float16 or bfloat16: x and residual [rows, columns], the vectors [columns]. The seed
    is two words of int32. p is rounded up to a multiple of 2^-16. Non-contiguous inputs are copied first. A row has at
    most 16,384 columns, 8192 on GPUs before Hopper.

    Raises:
        TypeError: another dtype, or several, or a seed that is not int32.
        ValueError: not on one CUDA device, x is no matrix, another tensor has the wrong shape, too many columns, or p
            is outside 0 to 65535 / 65536.
    """
    tensors.check("dropout_residual_norm", x=x, residual=residual)
    if x.ndim != 2:
        raise ValueError(f"dropout_residual_norm: x must be [rows, columns], got {tuple(x.shape)}")
    tensors.check_vectors("dropout_residual_norm", x, bias=bias, weight=weight, shift=shift)
    check_dropout(x, seed, p)
    if x.shape[1] > (most := most_columns(x.device)):
        raise ValueError(
            f"dropout_residual_norm: registers hold rows of {most} columns at most, got {x.shape[1]}"
        )
    differentiable = (x, bias, residual, weight, shift)
    training = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in differentiable)
    x, bias, residual, weight, shift, seed = (tensor.contiguous() for tensor in (*differentiable, seed))
    if training:
        return DropoutResidualNorm.apply(x, bias, residual, weight, shift, seed, p, eps)
    y, h, _, _ = forward_pass(x, bias, residual, weight, shift, seed, p, eps, save=False)
    return y, h


def apply(inputs: Mapping[str, torch.Tensor], **attributes: Any) -> dict[str, torch.Tensor]:
    given = (inputs[name] for name in ("x", "bias", "residual", "weight", "shift", "seed"))
    y, h = dropout_residual_norm(*given, **attributes)
    return {"y": y, "h": h}
