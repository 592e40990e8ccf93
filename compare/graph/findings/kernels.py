"""Findings about single kernels: those slower than their roofline time, and those that only move data."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from .. import formats
from ..analyse.roofline import Ceilings, roofline_point
from ..model import Access, Buffer
from ..operations import is_product, tokens
from .finding import Finding, rank
from .view import View, count, series

_SLOW = 0.1  # of a graph's time


def above_roofline(views: Sequence[View], ceilings: Ceilings) -> Iterator[Finding]:
    """Yield the kernel that loses most time against its roofline time."""
    found: list[Finding] = []
    for view in views:
        times = [view.time([index]) for index in range(len(view.kernels))]
        whole = sum(filter(None, times))
        for index, kernel in enumerate(view.kernels):
            point, time = roofline_point(view.graph, kernel, ceilings), times[index]
            if point is None or time is None or (lost := time - point.roofline_time_us) < _SLOW * whole:
                continue
            size = view.declared_bytes([index])
            if point.link_us == point.roofline_time_us:
                work = "sending its bytes to the other GPUs"
            elif point.memory_us >= point.compute_us:
                work = f"moving its {formats.size(size)}"
            else:
                work = f"computing its {formats.flops((kernel.flops or 0) * (kernel.launches or 1))}"
            text = (
                f"{view.kernel_label(index)} takes {view.time_words(time)}; "
                f"{work} needs {formats.microseconds(point.roofline_time_us)}."
            )
            kernels = {view.key: (index,)}
            found.append(Finding("above roofline", text, (view.key,), size, lost, kernels, predicted=view.predicted))
    yield from rank(found, lambda one: one.graphs[0], lambda one: one.us or 0.0)[:1]


def copies(view: View) -> Iterator[Finding]:
    """Yield the copy kernels; those that the same words describe make one finding. Prefetches do not count."""
    groups: dict[str, list[int]] = defaultdict(list)
    for index, kernel in enumerate(view.kernels):
        if kernel.kind == "copy" and not _is_prefetch(view, index):
            groups[_copying(view, index)].append(index)
    for words, indices in groups.items():
        size = view.declared_bytes(indices)
        if view.is_significant(size):
            copying = "one copy kernel moves" if len(indices) == 1 else f"{count(len(indices))} copy kernels move"
            text = f"{view.name} {words}; {copying} {formats.size(size)}."
            time, kernels = view.time(indices), {view.key: tuple(indices)}
            yield Finding("copy", text, (view.key,), size, time, kernels, predicted=view.predicted)


def _is_prefetch(view: View, index: int) -> bool:
    """Return whether a copy brings data into a TPU's VMEM, from which others read it."""
    return all(buffer.space == "VMEM" for buffer in view.buffers(index, "outputs"))


def _copying(view: View, index: int) -> str:
    """Return the copy's sources and users: "joins wg and wu into one operand for the product in gate"."""
    kernel, read, written = view.kernels[index], view.buffers(index, "inputs"), view.buffers(index, "outputs")
    users = sorted({user for buffer in written for user in view.graph.consumers.get(buffer.name, ())})
    products = [user for user in users if is_product(view.kernels[user])]
    operands = [buffer for buffer in read if buffer.role != "constant"]
    operands = [buffer for buffer in operands if buffer.shape] or operands  # a single number says where, or what to pad
    joins = {*tokens(kernel), *kernel.facts.get("opcodes", ())} & {"concatenate", "stack"}
    arrays = Counter(view.array(buffer) for buffer in operands)
    what = series(
        array if times == 1 else array.replace("the result", f"{count(times)} results")
        for array, times in arrays.items()
    )
    if not operands:
        verb = "fills an array"
    elif len(operands) == 2 and "gather" in tokens(kernel):
        indices, table = sorted(operands, key=lambda buffer: buffer.dtype[0] not in "su")
        verb = f"looks up {view.array(indices)} in {view.array(table)}"
    elif _partial(view, kernel.outputs):
        verb = f"stores {what} in a part of an array"
    elif joins and len(operands) > 1:
        verb = f"joins {what} into one {'operand' if products else 'array'}"
    elif len(operands) > 1:
        verb = f"copies {what}"
    else:
        verb = f"{_moving(view, index, operands[0], written)} {what}"
    if products:
        return f"{verb} for the product in {view.place(products)}"
    if users:
        return f"{verb} for {view.place(users)}"
    roles = {buffer.role for buffer in written}
    purpose = {"output": " for an output", "saved": " for backward, which never reads it"}
    return verb + next((words for role, words in purpose.items() if role in roles), "")


def _moving(view: View, index: int, read: Buffer, written: Sequence[Buffer]) -> str:
    """Return what a copy kernel does with its array: "pads", "broadcasts", "converts", "copies a part of"."""
    elements = sum(math.prod(buffer.shape) for buffer in written)
    names = tokens(view.kernels[index])
    if read.name in _partial(view, view.kernels[index].inputs):
        return "copies a part of"
    if "pad" in names or (elements > math.prod(read.shape) and len(view.kernels[index].inputs or ()) > 1):
        return "pads"
    if elements >= 2 * math.prod(read.shape):
        return "broadcasts"
    converts = elements == math.prod(read.shape) and any(buffer.dtype != read.dtype for buffer in written)
    return "converts" if converts else "copies"


def _partial(view: View, accesses: Sequence[Access] | None) -> set[str]:
    """Return the buffers of which a launch touches a part; other memories than the device's count no bytes."""
    found = [(access.bytes, view.graph.buffer[access.buffer]) for access in accesses or ()]
    return {b.name for size, b in found if size is not None and not b.space and size < b.bytes - b.padding}
