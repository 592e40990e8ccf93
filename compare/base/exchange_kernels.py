"""Names of what moves data between GPUs, as CUPTI reports them."""

import re

PEER_COPY = "[memcpy peer]"
# Kernels of NCCL and NVSHMEM, and those of XLA and PyTorch that read or write another GPU's memory. Inductor names its
# own kernels after the operations in them ("triton_poi_fused_all_gather_..."), so those are none.
_EXCHANGES = re.compile(
    r"nccl|nvshmem|multimem|(ragged_?)?all_?to_?all|all_?gather|all_?reduce|reduce_?scatter", re.IGNORECASE
)
_OF_INDUCTOR = "triton_"


def moves_between_gpus(name: str) -> bool:
    return name == PEER_COPY or (not name.startswith(_OF_INDUCTOR) and bool(_EXCHANGES.search(name)))
