"""Implementations that are wrong in one way each; the tests show that each way is noticed."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch

Tensors = dict[str, torch.Tensor]
_cached: dict[int, torch.Tensor] = {}


def right(inputs: Tensors) -> Tensors:
    return {"y": inputs["x"].float().softmax(-1).to(inputs["x"].dtype)}


def wrong_scale(inputs: Tensors) -> Tensors:
    """Off by one part in two thousand."""
    return {"y": right(inputs)["y"] * 1.0005}


def not_a_number(inputs: Tensors) -> Tensors:
    y = right(inputs)["y"].clone()
    y.view(-1)[-1] = float("nan")
    return {"y": y}


def unwritten_element(inputs: Tensors) -> Tensors:
    """The last element is left as the allocator gave it."""
    y = torch.empty_like(inputs["x"])
    y.view(-1)[:-1] = right(inputs)["y"].view(-1)[:-1]
    return {"y": y}


def cached_result(inputs: Tensors) -> Tensors:
    """Computes once for each input buffer."""
    key = inputs["x"].data_ptr()
    if key not in _cached:
        _cached[key] = right(inputs)["y"]
    return {"y": _cached[key]}


def changes_input(inputs: Tensors) -> Tensors:
    y = right(inputs)["y"]
    inputs["x"].view(-1)[0] += 1
    return {"y": y}


def missing_output(inputs: Tensors) -> Tensors:
    return {"z": right(inputs)["y"]}


def wrong_shape(inputs: Tensors) -> Tensors:
    return {"y": right(inputs)["y"][:1]}


class _HalfGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y = x.softmax(-1)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
        (y,) = ctx.saved_tensors
        return y * dy  # without the row's mean


def wrong_gradient(inputs: Tensors) -> Tensors:
    return {"y": _HalfGradient.apply(inputs["x"])}


def raises(inputs: Tensors) -> Tensors:
    raise ValueError("no such kernel")


def dies(inputs: Tensors) -> Tensors:
    os.kill(os.getpid(), signal.SIGKILL)
    return {}


def hangs(inputs: Tensors) -> Tensors:
    time.sleep(3600)
    return {}


def prints_megabytes(inputs: Tensors) -> Tensors:
    print("x" * (4 << 20))
    return right(inputs)
