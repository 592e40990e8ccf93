"""Findings about repeated work: by equal kernels, by fusion, or on purpose in backward."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from .. import formats
from ..analyse.align import phase_of
from ..analyse.products import split_products
from ..model import PHASES, Phase, SourceOp
from ..operations import MASKING, MOVEMENT, is_product, summarized, token
from .finding import Finding
from .view import View, count, how_often, named, series, verb


def duplicates(view: View) -> Iterator[Finding]:
    """Yield the kernels that are launched again for the same values."""
    groups: dict[tuple[str, str, int], list[list[int]]] = defaultdict(list)
    for group in _equal_kernels(view):
        groups[view.operations(group[:1]), view.place(group), len(group)].append(group)
    for (ops, place, times), found in groups.items():
        extra = [index for group in found for index in group[1:]]
        size = view.declared_bytes(extra)
        if view.is_significant(size):
            text = (
                f"{view.name} launches {ops} in {place} {how_often(times)}, from the same arrays to the same values. "
                f"One launch would move {formats.size(size)} less."
            )
            kernels = {view.key: tuple(index for group in found for index in group)}
            yield Finding("duplicate", text, (view.key,), size, view.time(extra), kernels, predicted=view.predicted)


def _equal_kernels(view: View) -> list[list[int]]:
    """Return groups of kernels with equal code, equal operations, equal inputs and outputs of equal shapes.

    Inductor gives kernels that read other elements of the same arrays other code, and a library call other views. The
    kernels that add up the partial sums of one product make other slices of its result. Checkpointing launches a kernel
    again on purpose, which `_on_purpose` tells.
    """
    adding_up = {each.sums for each in split_products(view.graph)}
    groups: dict[object, list[int]] = defaultdict(list)
    for index, kernel in enumerate(view.kernels):
        if index in adding_up or not kernel.inputs or not kernel.source_ops:
            continue
        if not all(op.site for op in kernel.source_ops):
            continue
        written = sorted((buffer.shape, buffer.dtype) for buffer in view.buffers(index, "outputs"))
        read = frozenset(access.buffer for access in kernel.inputs)
        code = kernel.facts.get("call"), tuple(kernel.facts.get("views", ()))
        computed = frozenset((op.site, op.rematerialized) for op in kernel.source_ops)
        groups[code, computed, read, tuple(written)].append(index)
    return [group for group in groups.values() if len(group) > 1]


@dataclass
class _Repeated:
    """Operations that one group of kernels computes again."""

    kernels: tuple[int, ...]
    places: dict[str, None] = field(default_factory=dict)
    ops: dict[str, None] = field(default_factory=dict)


def recomputations(views: Sequence[View]) -> Iterator[Finding]:
    for view in views:
        for phase in PHASES:
            for again in _computed_again(view, phase):
                holders = again.kernels
                size = _read_again(view, holders)
                if not view.is_significant(size):
                    continue
                where = f"{count(len(holders))} {'backward ' if phase == 'backward' else ''}kernels"
                others = [v.name for v in views if v is not view and _in_one_kernel(v, phase, again.places)]
                text = (
                    f"{view.name} computes {named(series(again.places), summarized(again.ops))} in {where}. "
                    f"They read {formats.size(size)} more than once."
                    + (f" {verb(others, 'use')} one kernel." if others else "")
                )
                yield Finding("recomputed", text, (view.key,), size, None, {view.key: holders})
        for again in _on_purpose(view):
            size = _read_in_forward(view, again.kernels)
            if view.is_significant(size):
                what = named(series(again.places), summarized(again.ops))
                text = (
                    f"{view.name} computes {what} again in backward, on purpose: "
                    f"it keeps fewer residuals and reads {formats.size(size)} a second time."
                )
                yield Finding("recomputed", text, (view.key,), size, None, {view.key: again.kernels})


def _computed_again(view: View, phase: Phase) -> list[_Repeated]:
    group_of = {index: number for number, group in enumerate(_equal_kernels(view)) for index in group}
    several = []
    for found in view.recomputed:
        kernels = tuple(sorted(i for i in found.kernels if phase_of(view.kernels[i], found.op) == phase))
        if len(kernels) > 1 and len({group_of.get(i, -1 - i) for i in kernels}) > 1:
            several.append((found.op, kernels))
    return _grouped(view, several)


def _on_purpose(view: View) -> list[_Repeated]:
    """Return the operations that checkpointing makes backward compute again.

    Where several backward kernels compute one, fusion repeats it, not the program.
    """
    holders: dict[str, dict[int, SourceOp]] = defaultdict(dict)
    for index, kernel in enumerate(view.kernels):
        for op in kernel.source_ops:
            if kernel.phase == "backward" and op.rematerialized:
                holders[op.site].setdefault(index, op)
    once = [held for held in holders.values() if len(held) == 1]
    return _grouped(view, [(op, (index,)) for held in once for index, op in held.items()])


def _read_in_forward(view: View, indices: Iterable[int]) -> int:
    """Return the bytes that these kernels read of buffers that forward's kernels read, too."""
    read = {a.buffer for kernel in view.kernels if kernel.phase == "forward" for a in kernel.inputs or ()}
    accesses = [(view.kernels[i].launches or 1, a) for i in indices for a in view.kernels[i].inputs or ()]
    return sum((access.bytes or 0) * launches for launches, access in accesses if access.buffer in read)


def _grouped(view: View, several: Iterable[tuple[SourceOp, tuple[int, ...]]]) -> list[_Repeated]:
    """Group operations by the kernels that compute them.

    Operations that only move data do not count, nor do those that only compute a mask.
    """
    groups: dict[tuple[int, ...], _Repeated] = {}
    for op, kernels in several:
        if token(op.op) not in MOVEMENT:
            again = groups.setdefault(kernels, _Repeated(kernels))
            again.places[view.stage(op) or formats.place(op.users_line)] = None
            again.ops[token(op.op)] = None
    return [again for again in groups.values() if not again.ops.keys() <= MASKING]


def _in_one_kernel(view: View, phase: Phase, places: Iterable[str]) -> bool:
    """Return whether a single kernel, which is no product's, computes these stages."""
    wanted = {(phase, place) for place in places}
    holders = {i for stage in wanted for i in view.holders.get(stage, ()) if not is_product(view.kernels[i])}
    return len(holders) == 1 and wanted <= view.stages[min(holders)]


def _read_again(view: View, indices: Sequence[int]) -> int:
    """Return the bytes that these kernels are known to read again: beyond the size of each buffer that they share."""
    sizes: dict[str, list[int]] = defaultdict(list)
    for index in indices:
        kernel = view.kernels[index]
        for access in kernel.inputs or ():
            sizes[access.buffer].append((access.bytes or 0) * (kernel.launches or 1))
    return sum(max(sum(reads) - max(view.graph.buffer[name].bytes, *reads, 0), 0) for name, reads in sizes.items())
