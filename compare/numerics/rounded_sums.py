"""Sums over rows in a narrow dtype, rounded after each addition: the independent evaluation of programs that sum so.

JAX adds the rows of a broadcast vector's gradient in the vector's dtype, and scatters an embedding's gradient in the
table's. XLA compiles these types as they are, so every addition rounds (`bf16[] add` in the optimized HLO of jax 0.10.2
and 0.11.2). The error is a property of the program. Its tolerance is twice the error of an evaluation that rounds after
each addition, in the order of a reduction on a GPU:

- A sum over rows has THREADS threads for each column. Each adds its rows one after the other, and the threads' sums are
  added pairwise. Above MOST_ROWS rows, groups of about their square root are added first, each in this way
  (xla/service/gpu/reduction_utils.cc, xla/service/gpu/transforms/tree_reduction_rewriter.cc).
- A scatter adds each row's terms one after the other, as atomic additions do. The evaluation is repeated in ORDERS
  random orders, and the largest error of a row counts: with few terms the error depends on their order.

A vector's tolerance covers all its elements. A matrix has a tolerance for each row, because its rows are sums of
different numbers of terms: a row of one term must be exact to one unit in its last place.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

THREADS, MOST_ROWS = 32, 4096
ORDERS = 4
_HALF = (torch.bfloat16, torch.float16)


class RoundedSums(TorchDispatchMode):
    """Rounds sums over leading axes, and accumulating scatters, to `dtype` after each addition.

    Sums over the last axis stay as they are: programs compute means and variances in float32.
    """

    def __init__(self, dtype: torch.dtype, order: int = 0) -> None:
        """order: a seed for the order in which a scatter adds."""
        super().__init__()
        self._dtype, self._order = dtype, order

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function == torch.ops.aten.sum.dim_IntList and args[0].dtype in _HALF:
            values, axes = args[0], sorted(axis % args[0].dim() for axis in args[1])
            if axes == list(range(len(axes))) and len(axes) < values.dim():
                summed = sum_over_rows(values.flatten(0, len(axes) - 1))
                keeps = len(args) > 2 and args[2]
                return summed[(None,) * len(axes)] if keeps else summed
        if function == torch.ops.aten.index_put.default and len(args) > 3 and args[3]:
            start, (ids,), terms = args[:3]
            generator = torch.Generator().manual_seed(self._order)
            order = torch.randperm(len(ids), generator=generator).to(ids.device)
            return scatter_in_order(start, ids[order], terms[order], self._dtype)
        return function(*args, **kwargs)


def sum_over_rows(values: torch.Tensor) -> torch.Tensor:
    """Return the sum over the first of two axes, each addition rounded to the values' dtype, in a GPU's order."""
    rows = len(values)
    groups = -(-rows // math.isqrt(rows)) if rows > MOST_ROWS else 1
    sums = _sums_of_groups(values, groups)
    return sums[0] if groups == 1 else sum_over_rows(sums)


def _sums_of_groups(values: torch.Tensor, groups: int) -> torch.Tensor:
    """Return the sum of each of `groups` equal groups of rows; rows of zeros fill the last one, which add exactly."""
    rows, columns = values.shape
    each = -(-rows // (groups * THREADS))
    filled = values.new_zeros(groups * each * THREADS, columns)
    filled[:rows] = values
    grouped = filled.view(groups, each, THREADS, columns)
    sums = grouped[:, 0]
    for number in range(1, each):
        sums = sums + grouped[:, number]
    while sums.shape[1] > 1:
        sums = sums[:, 0::2] + sums[:, 1::2]
    return sums[:, 0]


def scatter_in_order(start: torch.Tensor, ids: torch.Tensor, terms: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return `start` with each term added to its row, in the order of terms, rounded to `dtype` after each addition."""
    result = start.clone()
    order = torch.argsort(ids, stable=True)
    sorted_ids = ids[order]
    occurrence = torch.arange(len(ids), device=ids.device) - torch.searchsorted(sorted_ids, sorted_ids)
    for number in range(int(occurrence.max()) + 1 if len(ids) else 0):
        chosen = order[occurrence == number]  # the terms that are the number-th of their row
        rows = ids[chosen]
        result[rows] = (result[rows] + terms[chosen]).to(dtype).to(result.dtype)
    return result


def row_tolerances(rounded: Sequence[torch.Tensor], exact: torch.Tensor, eps: float) -> torch.Tensor:
    """Return each row's tolerance, absolute: twice the rounded evaluations' largest error, at least one unit in the
    last place of the row's largest value.

    A row of zeros allows eps times the rms of all values, so nothing may be added to it.
    """
    errors = 2 * torch.stack([(each.double() - exact.double()).abs().amax(-1) for each in rounded]).amax(0)
    units = eps * exact.abs().amax(-1).double()
    least = eps * exact.double().square().mean().sqrt()
    return torch.maximum(torch.maximum(errors, units), least)
