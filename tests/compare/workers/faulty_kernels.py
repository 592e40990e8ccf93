"""Triton kernels that do not compile, write where they must not, or never end.

Apart from faulty.py, for not every worker has Triton.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

Tensors = dict[str, torch.Tensor]


@triton.jit
def _refused(x, y, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    offsets = tl.arange(0, BLOCK)  # BLOCK is no power of two
    tl.store(y + offsets, tl.load(x + offsets))


@triton.jit
def _far_away(y, distance):  # type: ignore[no-untyped-def]
    tl.store(y + distance, 1.0)


@triton.jit
def _endless(y):  # type: ignore[no-untyped-def]
    value = tl.load(y, volatile=True)
    while value == value:
        value = tl.load(y, volatile=True)
    tl.store(y, value)


def refused(inputs: Tensors) -> Tensors:
    y = torch.empty_like(inputs["x"])
    _refused[(1,)](inputs["x"], y, BLOCK=100)
    return {"y": y}


def writes_far_away(inputs: Tensors) -> Tensors:
    """Stores 2^44 elements beyond the output: no mapping is there."""
    y = torch.empty_like(inputs["x"])
    _far_away[(1,)](y, 1 << 44)
    return {"y": y}


def never_ends(inputs: Tensors) -> Tensors:
    y = torch.zeros_like(inputs["x"])
    _endless[(1,)](y)
    return {"y": y}


