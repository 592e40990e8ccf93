"""One launch of a kernel template, its arguments as Python has them."""

from __future__ import annotations

import ctypes

import torch

from triton_side.calls import cuda_program
from triton_side.cuda import tensors


def launch(
    source: str, name: str, constants: tuple[int, ...], grid: int, block: tuple[int, int],
    *arguments: torch.Tensor | int | float | None, element: torch.dtype | None = None,
) -> None:
    """`name`<element, *constants>(*arguments) of the file `source`: an int goes as C's int, a float as its float, None
    as a null pointer. The first one is a tensor, and the element its dtype unless given."""
    first = arguments[0]
    assert isinstance(first, torch.Tensor)
    expression = f"{name}<{', '.join((tensors.CPP_TYPES[element or first.dtype], *map(str, constants)))}>"
    kernel = cuda_program.compile_kernel(source, expression, cuda_program.device_arch(first.device))
    cuda_program.launch(kernel, grid, block, [_passed(argument) for argument in arguments], first.device)


def _passed(argument: torch.Tensor | int | float | None) -> cuda_program.Argument:
    if argument is None:
        return ctypes.c_longlong(0)  # of a pointer's size
    if isinstance(argument, int):
        return ctypes.c_int(argument)
    return ctypes.c_float(argument) if isinstance(argument, float) else argument
