"""Findings about elementwise work inside the kernels of products."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .. import formats
from ..model import Phase
from ..operations import ANCHORS, MOVEMENT, REDUCTIONS, is_product, summarized, tokens
from .finding import Finding
from .phrases import count, named, series, verb
from .view import View


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
    of_products = [view.stage(op) or formats.place(op.line) for op in products]
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
