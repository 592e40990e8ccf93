"""The one file that uses PyTorch's symmetric memory, functional collectives and fake group, whose names are private.

Tested with the releases of torch in versions.py. torch 2.11 to 2.13 have the same names.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from xlafuse.triton_side.versions import TORCH_BUILDS

try:
    import torch.distributed._functional_collectives  # registers the operations below
    from torch.distributed import _symmetric_memory as symmetric

    allocate, rendezvous = symmetric.empty, symmetric.rendezvous
    FUNCTIONAL = torch.ops._c10d_functional
    FUSED_GATHER, FUSED_SCATTER = (
        torch.ops.symm_mem.fused_all_gather_matmul, torch.ops.symm_mem.fused_matmul_reduce_scatter,
    )
except (ImportError, AttributeError) as missing:
    raise ImportError(
        f"torch {torch.__version__} lacks a part of symmetric memory or of functional collectives: {missing}; install "
        f"one of the tested versions: {', '.join(sorted({release for release, _ in TORCH_BUILDS}))}"
    ) from missing


def symmetric_buffer(size: int, group: dist.ProcessGroup) -> tuple[list[Tensor], object]:
    """Return for each rank `size` bytes of its GPU, and an object that keeps the peers' mapped.

    Every rank calls this at the same point.
    """
    own = allocate(size, dtype=torch.uint8, device=torch.device("cuda", torch.cuda.current_device()))
    handle = rendezvous(own, group)
    if handle is None:
        raise RuntimeError("torch found no symmetric memory between the ranks' GPUs; they need peer access (NVLink)")
    return [
        own if rank == handle.rank else handle.get_buffer(rank, (size,), torch.uint8) for rank in range(group.size())
    ], handle


def group_without_peers(count: int) -> dist.ProcessGroup:
    """Return a group of so many ranks of which only the first exists: programs are compiled for it, none exchanges."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # it registers the backend "fake"

    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=count)
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def name_of(group: Any) -> str:
    return str(group.group_name)


# These four are not differentiable; `collectives.py` adds their gradients.
def gather_rows(x: Tensor, count: int, group: str) -> Tensor:
    """Return the rows of all ranks."""
    return FUNCTIONAL.wait_tensor(FUNCTIONAL.all_gather_into_tensor(x.contiguous(), count, group))


def scatter_sums(x: Tensor, count: int, group: str) -> Tensor:
    """Return this rank's rows of the sum over ranks."""
    return FUNCTIONAL.wait_tensor(FUNCTIONAL.reduce_scatter_tensor(x.contiguous(), "sum", count, group))


def exchange_rows(x: Tensor, received: list[int], sent: list[int], group: str) -> Tensor:
    """Send the first sent[0] rows to rank 0, the next to rank 1; return the rows of all ranks."""
    return FUNCTIONAL.wait_tensor(FUNCTIONAL.all_to_all_single(x.contiguous(), received, sent, group))


def sum_over_ranks(x: Tensor, group: str) -> Tensor:
    """Return the sum over ranks."""
    return FUNCTIONAL.wait_tensor(FUNCTIONAL.all_reduce(x.contiguous(), "sum", group))


class _GatherProducts(torch.autograd.Function):
    """x of all ranks times each weight; the exchange overlaps with the products, forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w_gate: Tensor, w_up: Tensor, group: str) -> tuple[Tensor, Tensor]:
        gathered, (gate, up) = FUSED_GATHER(x, [w_gate, w_up], 0, group)
        ctx.save_for_backward(gathered, w_gate, w_up)
        ctx.group = group
        return gate, up

    @staticmethod
    def backward(ctx: Any, dgate: Tensor, dup: Tensor) -> tuple[Tensor | None, ...]:
        gathered, w_gate, w_up = ctx.saved_tensors
        # One product over both hidden axes needs one exchange; two copies of the operands cost less.
        both, weights = torch.cat([dgate, dup], dim=1), torch.cat([w_gate, w_up], dim=1)
        dx = FUSED_SCATTER(both, weights.T, "sum", 0, ctx.group)
        return dx, gathered.T @ dgate, gathered.T @ dup, None


class _ProductScatter(torch.autograd.Function):
    """This rank's rows of the sum over ranks of x times the weight; overlapped as in `_GatherProducts`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, group: str) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.group = group
        return FUSED_SCATTER(x, weight, "sum", 0, group)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        gathered, (dx,) = FUSED_GATHER(dy.contiguous(), [weight.T], 0, ctx.group)
        return dx, x.T @ gathered, None


def gather_products(x: Tensor, w_gate: Tensor, w_up: Tensor, group: str) -> tuple[Tensor, Tensor]:
    return _GatherProducts.apply(x, w_gate, w_up, group)


def product_scatter(x: Tensor, weight: Tensor, group: str) -> Tensor:
    return _ProductScatter.apply(x, weight, group)
