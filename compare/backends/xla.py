"""The XLA backends: jax.jit as it is, with rematerialization, without fusion, and with kernels in Triton or Pallas."""

from dataclasses import replace

from .backend import Backend

XLA = Backend(
    name="xla", label="XLA", family="xla", worker="xla",
    prepare=".workers.xla.prepare:prepare",
    target_worker="xla", compile_for_target=".workers.xla.prepare:compile_for_target",
    cpu_check_worker="xla",
)
XLA_REMAT = replace(XLA, name="xla-remat", options={"recompute": True})
# Products of float32 arrays as three TF32 products. On a CPU jax refuses that algorithm.
XLA_TF32X3 = replace(
    XLA, name="xla-tf32x3", options={"matmul_precision": "tf32x3"}, cpu_check_worker=None,
    gpu_only="TF32 is a format of NVIDIA's tensor cores",
)
XLA_UNFUSED = replace(
    XLA, name="xla-unfused", options={"variant": "unfused"}, cpu_check_worker=None,
    gpu_only="the passes that it turns off are those of XLA for GPUs",
)
# Runs a PyTorch function. A PyTorch worker plans its Triton launches, and the Triton inside XLA compiles them.
XLA_TRITON = replace(
    XLA, name="xla-triton", label="XLA with hand-written Triton", family="xla-triton", cpu_check_worker=None,
    options={"function": ".workers.xla.triton_calls:launching"}, gpu_only="Triton compiles for GPUs",
    requires=("triton", "g++", "launch planning"),
)
# Mosaic GPU compiles the kernels of a Pallas function. On a CPU, Pallas' interpreter of Mosaic GPU runs them.
PALLAS = replace(
    XLA, name="pallas", label="hand-written Pallas", family="pallas", options={"interpreter": True}, hand_written=True,
    gpu_only="its Pallas kernels are written for Mosaic GPU, whose memory and instructions are an NVIDIA GPU's",
)
# A JAX program in which one operation is such a kernel.
XLA_PALLAS = replace(PALLAS, name="xla-pallas", label="XLA with hand-written Pallas", hand_written=False)
# A library that runs other kernels on a CPU, so a check there would say nothing of those for a GPU.
XLA_LIBRARY = replace(
    XLA, name="xla-library", label="XLA with a kernel library", family="xla-library", cpu_check_worker=None,
    gpu_only="the kernels that it calls are a GPU's",
)
