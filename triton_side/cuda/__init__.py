"""Raw CUDA C++ kernels, compiled by NVRTC and launched by cuda.core on PyTorch's memory and stream, without nvcc.

Each operation has two files. <op>.cu holds the kernels; <op>.py holds the launcher, the autograd.Function, the public
function and `apply(inputs)`. Shared device code is in include/, shared Python in common/. The operations that kernels
declare are those of the Triton kernels.

A thread loads 16 bytes at a time: 4 elements of fp32, 8 of bf16 or fp16. Arithmetic is in fp32. There are no atomics,
so every run gives the same bits. This module imports nothing.
"""
