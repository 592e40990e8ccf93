"""Exchanges between ranks as plain code uses them: NCCL or gloo, differentiable, also within torch.compile.

Without communication each is a local operation whose result has the same shape.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from xlafuse.triton_side.parallel import symmetric_memory as private
from xlafuse.triton_side.parallel.ranks import Ranks


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, count: int, group: str) -> Tensor:
        ctx.ranks = count, group
        return private.gather_rows(x, count, group)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        return private.scatter_sums(dy, *ctx.ranks), None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, count: int, group: str) -> Tensor:
        ctx.ranks = count, group
        return private.scatter_sums(x, count, group)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        return private.gather_rows(dy, *ctx.ranks), None, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, received: list[int], sent: list[int], group: str) -> Tensor:
        ctx.received, ctx.sent, ctx.group = received, sent, group
        return private.exchange_rows(x, received, sent, group)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        return private.exchange_rows(dy, ctx.sent, ctx.received, ctx.group), None, None, None


def all_gather(x: Tensor, ranks: Ranks) -> Tensor:
    """Return the rows of all ranks, in their order; the gradient is summed over ranks and split again."""
    if not ranks.communicate:
        return x.repeat(ranks.count, 1)
    return _AllGather.apply(x, ranks.count, private.name_of(ranks.group))


def reduce_scatter(x: Tensor, ranks: Ranks) -> Tensor:
    """Return this rank's share of the rows of the sum over ranks."""
    if not ranks.communicate:
        return x.view(ranks.count, -1, x.shape[1])[ranks.rank].clone()
    return _ReduceScatter.apply(x, ranks.count, private.name_of(ranks.group))


def all_to_all(x: Tensor, received: list[int], sent: list[int], ranks: Ranks) -> Tensor:
    """Send consecutive rows to the ranks, sent[r] to rank r; return received[r] rows of each rank r, in their order."""
    if not ranks.communicate:
        rows = sum(received)
        copies = -(-rows // max(1, len(x)))
        return x.repeat(copies, *[1] * (x.ndim - 1))[:rows] if len(x) else x.new_zeros(rows, *x.shape[1:])
    return _AllToAll.apply(x, received, sent, private.name_of(ranks.group))


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None]:
        return private.sum_over_ranks(dx, ctx.group), None


def whole(x: Tensor, ranks: Ranks) -> Tensor:
    """Return x, which is the same on every rank; its gradient is summed over them."""
    return _Whole.apply(x, private.name_of(ranks.group)) if ranks.communicate else x


def sum_over_ranks(x: Tensor, ranks: Ranks) -> Tensor:
    """Return the sum of the ranks' x; not differentiable."""
    return private.sum_over_ranks(x, private.name_of(ranks.group)) if ranks.communicate else x
