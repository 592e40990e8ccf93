"""Launches elementwise kernel templates (elementwise.cuh), out[i] = f(inputs[0][i], ...).

A block of 256 threads covers one tile; each thread loads 2 packs of 16 bytes from each input before it computes
anything. With two inputs a multiprocessor of 2048 resident threads then has 128 KiB of reads in flight, about four
times what hides 700 ns of memory latency at 1/132 of an H200's 4.8 TB/s. An unaligned view takes the scalar path, 8
elements per thread.
"""

from __future__ import annotations

import ctypes

import torch

from triton_side.calls import cuda_program
from triton_side.cuda import tensors

THREADS = 256
VECTORS = 2  # 16-byte loads per thread and input
SCALARS = 8  # elements per thread where the loads must be scalar


def launch(source: str, name: str, inputs: tuple[torch.Tensor, ...], out: torch.Tensor) -> None:
    """Launch the template `name`<T, LANES, VECTORS, THREADS> of the file `source`; all tensors are contiguous."""
    elements = out.numel()
    if elements == 0:
        return
    lanes = tensors.lanes(*inputs, out)
    vectors = VECTORS if lanes > 1 else SCALARS
    expression = f"{name}<{tensors.CPP_TYPES[out.dtype]}, {lanes}, {vectors}, {THREADS}>"
    kernel = cuda_program.compile_kernel(source, expression, cuda_program.device_arch(out.device))
    tiles = -(-elements // (THREADS * vectors * lanes))
    cuda_program.launch(kernel, tiles, (THREADS, 1), (*inputs, out, ctypes.c_longlong(elements)), out.device)
