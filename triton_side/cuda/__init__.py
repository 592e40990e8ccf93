"""Raw CUDA C++ kernels, compiled by NVRTC and launched by cuda.core on PyTorch's memory and stream; nvcc is not needed.

Each operation is a readable <op>.cu and a <op>.py with its launcher, autograd.Function, public function and
`apply(inputs)`. A 16-byte load per thread moves 4 (fp32) or 8 (bf16, fp16) elements; arithmetic is in fp32. No atomics:
results are the same bits in every run. Nothing is imported here.
"""
