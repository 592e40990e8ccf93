"""Compile and launch one instance of a kernel template, with the arguments as Python has them."""

from __future__ import annotations

import ctypes

import torch

from xlafuse.triton_side.calls import cuda_program
from xlafuse.triton_side.cuda.common import tensors

THREADS = 256  # of an elementwise kernel's block
# Each thread loads 2 packs of 16 bytes from each input before it computes. With two inputs, a multiprocessor of 2048
# resident threads then has 128 KiB of reads in flight, about four times what hides 700 ns of memory latency
# at 1/132 of an H200's 4.8 TB/s.
VECTORS = 2
SCALARS = 8  # elements per thread where the loads must be scalar

Value = torch.Tensor | ctypes.c_longlong | int | float | None


def launch(
    source: str, name: str, constants: tuple[int | str, ...], grid: int, block: tuple[int, int],
    *arguments: Value, element: torch.dtype | None = None, options: tuple[str, ...] = (),
) -> None:
    """Launch `name`<element, *constants>(*arguments) of the file `source`, compiled with NVRTC's `options`.

    An int is passed as C's int, a float as its float, None as a null pointer. The first argument is a tensor; its dtype
    is the template's element type unless `element` is given.
    """
    first = arguments[0]
    assert isinstance(first, torch.Tensor)
    instance = expression(name, element or first.dtype, *constants)
    kernel = cuda_program.compile_kernel(source, instance, cuda_program.device_arch(first.device), *options)
    cuda_program.launch(kernel, grid, block, [_converted(argument) for argument in arguments], first.device)


def launch_elementwise(source: str, name: str, inputs: tuple[torch.Tensor, ...], out: torch.Tensor) -> None:
    """Launch an elementwise template (include/elementwise.cuh), out[i] = f(inputs[0][i], ...), on contiguous tensors.

    A block covers one tile. A view that is not 16-byte aligned is loaded element by element.
    """
    elements = out.numel()
    if elements == 0:
        return
    lanes = tensors.lanes(*inputs, out)
    vectors = VECTORS if lanes > 1 else SCALARS
    tiles = -(-elements // (THREADS * vectors * lanes))
    constants = (lanes, vectors, THREADS)
    launch(source, name, constants, tiles, (THREADS, 1), *inputs, out, ctypes.c_longlong(elements))


def expression(name: str, element: torch.dtype, *constants: int | str) -> str:
    """Return the C++ name of a template's instance, such as "gelu_forward<float, 4, 2, 256>"."""
    return f"{name}<{', '.join((tensors.CPP_TYPES[element], *map(str, constants)))}>"


def _converted(argument: Value) -> cuda_program.Argument:
    if argument is None:
        return ctypes.c_longlong(0)  # as wide as a pointer
    if isinstance(argument, int):
        return ctypes.c_int(argument)
    return ctypes.c_float(argument) if isinstance(argument, float) else argument
