"""PyTorch: one operation after the other, TorchInductor, and FlexAttention, which Inductor compiles."""

from dataclasses import replace

from .backend import Backend

EAGER = Backend(
    name="eager", label="PyTorch", family="eager", worker="torch",
    prepare=".workers.pytorch.prepare:eager",
    target_worker="target", compile_for_target=".workers.pytorch.target:eager",
    cpu_check_worker="torch", prebuilt=True, gpu_only="PyTorch's prebuilt kernels here are a GPU's",
)
INDUCTOR = Backend(
    name="inductor", label="TorchInductor", family="inductor", worker="torch",
    prepare=".workers.pytorch.prepare:inductor",
    target_worker="target", compile_for_target=".workers.pytorch.target:inductor",
    cpu_check_worker="torch", gpu_only="TorchInductor's code here is Triton for GPUs", requires=("triton", "g++"),
)
INDUCTOR_MAX = replace(
    INDUCTOR, name="inductor-max", options={"mode": "max-autotune-no-cudagraphs"}, cpu_check_worker=None,
    autotunes_for_minutes=True,
)
INDUCTOR_CUDAGRAPHS = replace(
    INDUCTOR, name="inductor-cudagraphs", options={"mode": "reduce-overhead"}, cpu_check_worker=None,
    replays_graphs=True,
)
# A user's function under torch.compile, with the settings that the user gave there.
OWN_INDUCTOR = replace(
    INDUCTOR, name="own-inductor", label="a function under torch.compile", options={"compiles_itself": True},
)
# FlexAttention calls torch.compile itself, at its first call.
FLEX = replace(
    INDUCTOR, name="flex", label="FlexAttention", family="flex", options={"compiles_itself": True},
    cpu_check_worker=None, requires=("triton",),
)
