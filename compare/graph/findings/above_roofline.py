"""Kernels slower than their roofline time, and products that compute more FLOPs than they need."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from ...base.text import number
from .. import formats
from ..analyse.dense_ragged import dense_ragged_products
from ..analyse.excess import excesses
from ..analyse.roofline import Ceilings, product_time_us, roofline_point
from ..operations import ANCHORS, token
from .finding import Finding
from .phrases import series
from .ranking import rank
from .view import View

_SLOW = 0.1  # of a graph's time
# Compilers count fewer FLOPs for masked attention than its tiles compute, so small excesses mean nothing.
_SIGNIFICANT = 0.05  # of a graph's time


def above_roofline(views: Sequence[View], ceilings: Ceilings) -> Iterator[Finding]:
    """Yield the kernel that loses most time against its roofline time."""
    found: list[Finding] = []
    for view in views:
        whole = sum(kernel.device_time_us or 0.0 for kernel in view.kernels)
        for index, kernel in enumerate(view.kernels):
            point, time = roofline_point(view.graph, kernel, ceilings), kernel.device_time_us
            if point is None or time is None or (lost := time - point.roofline_time_us) < _SLOW * whole:
                continue
            size = view.declared_bytes([index])
            if point.memory_us >= point.compute_us:
                work = f"moving its {formats.size(size)}"
            else:
                work = f"computing its {formats.flops((kernel.flops or 0) * (kernel.launches or 1))}"
            text = (
                f"{view.kernel_label(index)} takes {formats.microseconds(time)}; "
                f"{work} needs {formats.microseconds(point.roofline_time_us)}."
            )
            found.append(Finding("above roofline", text, (view.key,), size, lost, {view.key: (index,)}))
    yield from rank(found, lambda one: one.graphs[0], lambda one: one.us or 0.0)[:1]


def dense_ragged(view: View, ceilings: Ceilings | None) -> Iterator[Finding]:
    """Yield the ragged products that the compiler computes densely."""
    places: dict[tuple[str, int | None], list[int]] = defaultdict(list)
    for index, groups in dense_ragged_products(view.graph).items():
        places[view.place([index]), groups].append(index)
    for (place, groups), indices in places.items():
        text = f"{view.name} computes the ragged product of {place} densely, each row with every group"
        flops = sum((view.kernels[index].flops or 0.0) * (view.kernels[index].launches or 1) for index in indices)
        us = None
        if groups and flops:
            text += f": {formats.flops(flops)}, {groups:,} times as many as it needs"
            us = product_time_us(view.graph, view.kernels[indices[0]], flops * (1 - 1 / groups), ceilings)
        yield Finding("dense ragged product", f"{text}.", (view.key,), 0, us, {view.key: tuple(indices)})


def more_flops(views: Sequence[View], ceilings: Ceilings | None) -> Iterator[Finding]:
    """Yield the graphs whose products compute more than the other graphs need, where that costs a measurable time."""
    for excess in excesses([view.graph for view in views], ceilings):
        view, others = views[excess.graph], [views[index] for index in excess.references]
        whole = view.time(range(len(view.kernels)))
        if ceilings is not None and (excess.us is None or excess.us < _SIGNIFICANT * (whole or 0.0)):
            continue
        products = [op for i in excess.kernels for op in view.kernels[i].source_ops if token(op.op) in ANCHORS]
        place = series([view.stage(op) or formats.place(op.line) for op in products]) or view.place(excess.kernels)
        repeated = f" ({formats.flops(excess.repeated)} of them repeated)" if excess.repeated else ""
        text = (
            f"{view.name} computes {formats.flops(excess.flops)} in the products of {place}{repeated}, "
            f"{number(excess.flops / excess.needed, 2)} times as many as {series([other.name for other in others])} "
            f"({formats.flops(excess.needed)})."
        )
        keys = tuple(other.key for other in (view, *others))
        yield Finding("more FLOPs", text, keys, 0, excess.us, {view.key: excess.kernels})
