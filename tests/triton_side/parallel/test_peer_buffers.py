"""Memory for exchanges with the peers, on a GPU."""

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402

from xlafuse.compare.workers.pytorch.worker import NanEmpty  # noqa: E402
from xlafuse.triton_side.parallel.peer_buffers import PeerBuffers  # noqa: E402
from xlafuse.triton_side.parallel.ranks import Ranks  # noqa: E402


@pytest.mark.gpu
def test_new_memory_is_filled_before_the_copy_and_without_waiting_for_kernels(tmp_path: Path) -> None:
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        buffers = PeerBuffers(1024, Ranks(0, 1, dist.group.WORLD), torch.device("cuda"), put=False, overlap=True)
        arrived = torch.ones(1 << 20, device="cuda")
        copying = buffers.copying_stream()

        def exchange() -> torch.Tensor:
            with NanEmpty():
                memory = buffers.allocate(arrived.shape, arrived.dtype)
            with torch.cuda.stream(copying):
                memory.copy_(arrived)
            copying.synchronize()
            return memory

        exchange()  # CUDA loads a kernel at its first launch, which may wait for kernels that run
        torch.cuda.synchronize()
        torch.cuda._sleep(1 << 32)  # about 2 s
        memory = exchange()
        assert not torch.cuda.current_stream().query()
        torch.cuda.synchronize()
        assert torch.equal(memory, arrived)
    finally:
        dist.destroy_process_group()
