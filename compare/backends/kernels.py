"""Hand-written GPU kernels: Triton, libraries of Triton kernels, raw CUDA C++."""

from dataclasses import replace

from .backend import Backend

TRITON = Backend(
    name="triton", label="Triton", family="triton", worker="torch",
    prepare=".workers.pytorch.prepare:kernels",
    target_worker="target", compile_for_target=".workers.pytorch.target:kernels",
    cpu_check_worker="interpreter", hand_written=True, gpu_only="Triton compiles for GPUs",
    requires=("triton",),
)
TRITON_CUDAGRAPHS = replace(TRITON, name="triton-cudagraphs", cpu_check_worker=None, replays_graphs=True)
# Triton's interpreter lacks the libdevice functions that these kernels call.
TRITON_LIBRARY = replace(
    TRITON, name="triton-library", family="triton-library", cpu_check_worker=None, hand_written=False
)
# A user's function of PyTorch operations, Triton kernels or both.
OWN_TORCH = replace(
    TRITON, name="own-torch", label="a PyTorch function", family="own-torch", hand_written=False, requires=(),
    gpu_only="XLA, the compiler for TPUs here, takes JAX programs",
)
CUDA = replace(
    TRITON, name="cuda", label="raw CUDA C++", family="cuda", cpu_check_worker=None,
    gpu_only="CUDA C++ is for NVIDIA GPUs", requires=("nvrtc",),
)
