"""Make a library's kernels, which bypass PyTorch's dispatcher, one operation of it while a call is recorded."""

import functools
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from xlafuse.triton_side.calls import stages

_Result = TypeVar("_Result", Tensor, list[Tensor])


def operation(name: str) -> Callable[[Callable[..., _Result]], Callable[..., _Result]]:
    """Return a decorator for a function that returns new tensors, annotated as torch.library.custom_op requires.

    While triton_side.calls.dispatch records, the function is called as the operation "xlafuse.<name>", which stands for
    all its launches. Otherwise it is called directly, because the dispatcher costs tens of microseconds of host time.
    """

    def wrap(function: Callable[..., _Result]) -> Callable[..., _Result]:
        registered = torch.library.custom_op(f"xlafuse::{name}", function, mutates_args=())

        @functools.wraps(function)
        def call(*args: object) -> _Result:
            return registered(*args) if stages.recording() else function(*args)

        return call

    return wrap
