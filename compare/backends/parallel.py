"""Programs that span several GPUs of one host, with a process for each GPU: XLA's, and PyTorch's."""

from dataclasses import replace

from .backend import Backend

XLA_RANKS = Backend(
    name="xla-ranks", label="XLA on several GPUs", family="xla-ranks", worker="xla",
    prepare=".workers.xla.rank_programs:program_of",
    target_worker="xla", compile_for_target=".workers.xla.rank_programs:compile_for_target",
    cpu_check_worker="xla", spans_gpus=True, gpu_only="programs over several chips are compiled for GPUs here",
)
# jax 0.11 schedules exchanges to overlap with other kernels by default.
XLA_IN_ORDER = replace(
    XLA_RANKS, name="xla-ranks-in-order", options={"flags": {"xla_gpu_enable_latency_hiding_scheduler": False}},
)
# Only a GPU runs XLA's ragged exchange. Between processes, jax 0.11.2 needs to be told how many GPUs NVLink joins.
XLA_RAGGED = replace(
    XLA_RANKS, name="xla-ranks-ragged", cpu_check_worker=None,
    options={"ranks_flag": "xla_gpu_unsupported_override_fast_interconnect_slice_size"},
)
# XLA's partitioner adds the exchanges to a program of whole arrays.
XLA_SHARDED = replace(XLA_RANKS, name="xla-ranks-sharded", options={"partitioned": True})
# It also splits a product next to an exchange into one for each rank, and exchanges while it multiplies.
XLA_WINDOWED = replace(
    XLA_SHARDED, name="xla-ranks-windowed",
    options={
        "partitioned": True,
        "flags": {"xla_gpu_threshold_for_windowed_einsum_mib": 0},
    },
)
EAGER_RANKS = Backend(
    name="eager-ranks", label="PyTorch on several GPUs", family="eager-ranks", worker="torch",
    prepare=".workers.pytorch.ranks:eager", target_worker=None, compile_for_target=None,
    cpu_check_worker="torch", prebuilt=True, spans_gpus=True, gpu_only="PyTorch's code here is a GPU's",
)
INDUCTOR_RANKS = replace(
    EAGER_RANKS, name="inductor-ranks", label="TorchInductor on several GPUs", family="inductor-ranks",
    prepare=".workers.pytorch.ranks:inductor", prebuilt=False, requires=("triton", "g++"),
    target_worker="target", compile_for_target=".workers.pytorch.target:inductor_ranks",
)
# The routing decides how many rows such a program exchanges, and a compile without a GPU does not know them.
INDUCTOR_ROUTED = replace(INDUCTOR_RANKS, name="inductor-ranks-routed", target_worker=None, compile_for_target=None)
INDUCTOR_ASYNC = replace(INDUCTOR_RANKS, name="inductor-ranks-async", cpu_check_worker=None)
TRITON_RANKS = replace(
    EAGER_RANKS, name="triton-ranks", label="Triton on several GPUs", family="triton-ranks",
    prepare=".workers.pytorch.ranks:kernels", prebuilt=False, hand_written=True, cpu_check_worker=None,
    requires=("triton",),
)
TRITON_RANKS_CUDAGRAPHS = replace(TRITON_RANKS, name="triton-ranks-cudagraphs", replays_graphs=True)
