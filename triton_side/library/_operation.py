"""Kernels that a library launches past PyTorch's dispatcher, as one operation of it while a call is being recorded."""

import functools
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from triton_side.calls import stages

_Result = TypeVar("_Result", Tensor, list[Tensor])


def operation(name: str) -> Callable[[Callable[..., _Result]], Callable[..., _Result]]:
    """Decorator for a function, annotated as torch.library.custom_op asks, that returns new tensors. While
    triton_side.calls.dispatch records, it is called as the operation "xlafuse.<name>", which then stands for all that
    it launches; else it is called as it is, for the dispatcher costs tens of microseconds of host time."""

    def wrap(function: Callable[..., _Result]) -> Callable[..., _Result]:
        registered = torch.library.custom_op(f"xlafuse::{name}", function, mutates_args=())

        @functools.wraps(function)
        def call(*args: object) -> _Result:
            return registered(*args) if stages.recording() else function(*args)

        return call

    return wrap
