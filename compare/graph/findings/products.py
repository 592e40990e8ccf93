"""Findings about products: elementwise work in their kernels, and FLOPs that they need not compute."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ...base.text import number
from .. import formats
from ..analyse.excess import excesses
from ..analyse.products import dense_ragged_products
from ..analyse.roofline import Ceilings, product_time_us
from ..model import Phase
from ..operations import ANCHORS, MOVEMENT, REDUCTIONS, is_product, summarized, token, tokens
from .finding import Finding
from .view import View, count, named, series, verb

# Compilers count fewer FLOPs for masked attention than its tiles compute, so small excesses mean nothing.
_SIGNIFICANT = 0.05  # of a graph's time


@dataclass(frozen=True)
class _Extra:
    """Elementwise work in a product's kernel. bytes: the traffic that a separate kernel would add."""

    view: View
    index: int
    stages: tuple[str, ...]
    bytes: int


def inside_products(views: Sequence[View]) -> Iterator[Finding]:
    """Yield the elementwise work that a product's kernel does, with the traffic that this saves."""
    groups: dict[tuple[Phase, str, str, tuple[str, ...]], list[_Extra]] = defaultdict(list)
    for view in views:
        for index in range(len(view.kernels)):
            for of, spared, ops, extra in _around_product(view, index):
                groups[view.kernels[index].phase, of, spared, ops].append(extra)
    for (phase, of, spared, ops), held in groups.items():
        sizes: Counter[str] = Counter()
        for extra in held:
            sizes[extra.view.key] += extra.bytes
        owners = [view for view in views if view.is_significant(sizes[view.key])]
        if not owners:
            continue
        stages = dict.fromkeys(stage for extra in held for stage in extra.stages)
        size = max(sizes[view.key] for view in owners)
        kernels = {view.key: tuple(extra.index for extra in held if extra.view is view) for view in owners}
        many = max(map(len, kernels.values()))
        elsewhere = [view for view in views if view not in owners and _apart(view, phase, set(stages))]
        others = f" {verb([view.name for view in elsewhere], 'use')} separate kernels." if elsewhere else ""
        text = (
            f"{verb([view.name for view in owners], 'compute')} {named(series(stages), ops)} inside the product of {of}"
            f"{f', in {count(many)} kernels' if many > 1 else ''}. This saves {spared}: {formats.size(size)}."
            f"{others}"
        )
        yield Finding("inside a product", text, tuple(kernels), size, None, kernels)


def _around_product(view: View, index: int) -> Iterator[tuple[str, str, tuple[str, ...], _Extra]]:
    """Yield the work of a product's kernel before and after the product.

    Each item is (the product's stage, the traffic that this saves in words, the operations, the work).
    """
    kernel = view.kernels[index]
    names = tokens(kernel)
    anchors = [position for position, name in enumerate(names) if name in ANCHORS]
    if not is_product(kernel) or not anchors:
        return
    products = [kernel.source_ops[position] for position in anchors]
    of_products = [view.stage(op) or formats.place(op.users_line) for op in products]
    of = series(of_products) or formats.name(kernel.name)
    launches = kernel.launches or 1
    for before, span in ((True, range(anchors[0])), (False, range(anchors[-1] + 1, len(names)))):
        extra = [position for position in span if names[position] not in MOVEMENT | REDUCTIONS]
        if extra:
            stages = [view.stage(kernel.source_ops[position]) for position in extra]
            apart = tuple(stage for stage in dict.fromkeys(stages) if stage and stage not in of_products)
            written = sorted((buffer.bytes for buffer in view.buffers(index, "outputs")), reverse=True)
            many = len(anchors) if not _between_anchors(names, anchors) else 1
            results = "its result" if many == 1 else f"its {count(many)} results"
            again = "it" if many == 1 else "them"
            if before:
                spared, size = "writing its operand and reading it again", 2 * _operand(view, index)
            elif len(written) == 1:
                spared, size = f"writing {results} and reading {again} again", 2 * written[0] * many
            else:  # the kernel writes the results, too, for backward
                spared, size = f"reading {results} again", sum(written[:many])
            ops = tuple(summarized(names[position] for position in extra))
            yield of, spared, ops, _Extra(view, index, apart, size * launches)


def _between_anchors(names: Sequence[str], anchors: Sequence[int]) -> bool:
    """Return whether work lies between a kernel's products; then the first result is not left for the epilogue."""
    return any(name not in MOVEMENT | ANCHORS for name in names[anchors[0] : anchors[-1]])


def _operand(view: View, index: int) -> int:
    """Return the bytes of the smallest matrix that the kernel reads, an upper bound for a prologue's operand."""
    read = view.buffers(index, "inputs")
    matrices = [buffer.bytes for buffer in read if len(buffer.shape) > 1] or [buffer.bytes for buffer in read]
    return min(matrices, default=0)


def _apart(view: View, phase: Phase, stages: set[str]) -> bool:
    return any(not is_product(view.kernels[i]) for stage in stages for i in view.holders.get((phase, stage), ()))


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
        named = [view.stage(op) or formats.place(op.users_line) for op in products]
        place = series(named) or view.place(excess.kernels)
        repeated = f" ({formats.flops(excess.repeated)} of them repeated)" if excess.repeated else ""
        text = (
            f"{view.name} computes {formats.flops(excess.flops)} in the products of {place}{repeated}, "
            f"{number(excess.flops / excess.needed, 2)} times as many as {series([other.name for other in others])} "
            f"({formats.flops(excess.needed)})."
        )
        keys = tuple(other.key for other in (view, *others))
        yield Finding("more FLOPs", text, keys, 0, excess.us, {view.key: excess.kernels})
