"""The differences between two fusion graphs in a terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ...base.text import printable
from .. import formats
from ..analyse.diff import GraphDiff, KernelChange, ReasonChange, kernels_of
from ..analyse.totals import declared_bytes, totals
from ..model import FusionGraph, Kernel, SourceOp
from .text_view import MOST_KERNELS, add_buffers, add_some, in_columns, plain

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table
    from rich.tree import Tree

_WORDS = {
    "split": "split", "merged": "merged", "regrouped": "regrouped", "appeared": "appeared", "vanished": "vanished",
    "bytes": "changed arrays", "kind": "changed kind", "operations": "changed operations",
    "code": "other code for the same work",
}


def tree(title: str, change: GraphDiff, a: FusionGraph, b: FusionGraph) -> RenderableType:
    """Return a tree of changed kernels before (-) and after (+), buffers and reasons, in the order of `change`."""
    from rich.tree import Tree

    root = Tree(plain(printable(title), "bold"), guide_style="dim")
    root.add(plain("no difference" if change.empty else _totals(a, b)))
    for number, each in enumerate(change.kernels):
        if number == MOST_KERNELS:
            add_some(root, (), len(change.kernels) - number, "more changes of kernels")
            break
        if a.kernels is None or b.kernels is None:
            _add_operations(root, each, a.operations, b.operations)
        else:
            _add_kernels(root, each, a.kernels, b.kernels)
    new = [buffer.buffer for buffer in change.buffers if buffer.materialized]
    gone = [buffer.buffer for buffer in change.buffers if not buffer.materialized]
    if new:
        add_buffers(root, "written to memory now", new, b, most=MOST_KERNELS, size=formats.signed_size)
    if gone:
        add_buffers(
            root, "no longer written to memory", gone, a, most=MOST_KERNELS,
            size=lambda freed: formats.signed_size(-freed),
        )
    if change.reasons:
        branch = root.add(plain("changed reasons for not fusing", "bold"))
        add_some(branch, map(_reason, change.reasons[:MOST_KERNELS]), len(change.reasons) - MOST_KERNELS)
    return root


def _totals(a: FusionGraph, b: FusionGraph) -> str:
    if a.kernels is None or b.kernels is None:
        return f"{len(a.operations)} → {len(b.operations)} operations"
    kernels = [str(len(graph.kernels or ())) for graph in (a, b)]
    declared = [totals(graph).declared.in_words(formats.size) for graph in (a, b)]
    noun = "kernel" if kernels == ["1", "1"] else "kernels"
    return f"{kernels[0]} → {kernels[1]} {noun}, {declared[0]} → {declared[1]} declared"


def _add_operations(
    root: Tree, change: KernelChange, before: tuple[SourceOp, ...], after: tuple[SourceOp, ...]
) -> None:
    """Add a change between graphs that have operations and no kernels."""
    branch = root.add(plain(_WORDS[change.kind], "bold"))
    for sign, operations, indices in (("-", before, change.before), ("+", after, change.after)):
        for index in indices:
            op = operations[index]
            place = formats.place(op.users_line or op.stage)
            branch.add(plain(f"{sign} {index + 1}. {formats.operation(op)}{f' ({place})' if place else ''}"))


def _add_kernels(root: Tree, change: KernelChange, before: tuple[Kernel, ...], after: tuple[Kernel, ...]) -> None:
    label = _WORDS[change.kind]
    if change.stages:
        label += f": {formats.name(', '.join(change.stages), 60)}"
    cost = formats.signed_size(change.bytes)
    if change.time_us is not None:
        cost += f", {change.time_us:+.1f} µs"
    branch = root.add(in_columns((label, cost), (None, 20), right=(1,), style="bold"))
    for sign, kernels, indices in (("-", before, change.before), ("+", after, change.after)):
        add_some(branch, [_kernel(sign, index, kernels[index]) for index in indices])
    if change.kind == "code":
        branch.add(plain(f"from {_code(before[change.before[0]])} to {_code(after[change.after[0]])}"))
    if change.kind == "operations":
        old, new = (before[i].source_ops for i in change.before), (after[i].source_ops for i in change.after)
        for label, words in _exchanged(*next(zip(old, new, strict=True))):
            branch.add(plain(f"{label}: {words}"))


def _code(kernel: Kernel) -> str:
    library, fusion = (str(kernel.facts.get(name) or "") for name in ("custom_call_target", "fusion_kind"))
    if library or kernel.facts.get("extern"):
        return f"the library call {formats.name(library or kernel.name)}"
    return f"a fusion of kind {formats.name(fusion)}" if fusion else "the compiler's own code"


def _exchanged(old: Iterable[SourceOp], new: Iterable[SourceOp]) -> Iterator[tuple[str, str]]:
    """Yield the operations, with their lines, that only one of two kernels has."""
    held = [
        Counter((formats.operation(op), formats.place(op.users_line or op.stage)) for op in ops) for ops in (old, new)
    ]
    for label, more in (("without", held[0] - held[1]), ("with", held[1] - held[0])):
        if more:
            yield label, formats.words(f"{op} ({place})" if place else op for op, place in more.elements())


def _kernel(sign: str, index: int, kernel: Kernel) -> Table:
    name = f"{sign} {index + 1}. {formats.name(kernel.name, 42)}"
    cells = name, formats.name(kernel.kind, 12), formats.size(declared_bytes(kernel))
    return in_columns(cells, (None, 12, 8), right=(2,))


def _reason(change: ReasonChange) -> str:
    before, after = (", ".join(codes) or "none" for codes in (change.before, change.after))
    producer, consumer = (formats.name(name, 30) if name else "?" for name in (change.producer, change.consumer))
    return f"{producer} → {consumer}: {before} → {after}"


def to_json(change: GraphDiff, a: FusionGraph, b: FusionGraph) -> dict[str, Any]:
    """Return the lists of `GraphDiff`; kernels have their names and launch indices."""
    old, new = kernels_of(a), kernels_of(b)
    kernels = [
        {
            **asdict(kernel), "before_names": [old[index].name for index in kernel.before],
            "after_names": [new[index].name for index in kernel.after],
        }
        for kernel in change.kernels
    ]
    buffers = [{**asdict(each), "bytes": each.bytes} for each in change.buffers]
    return {"kernels": kernels, "buffers": buffers, "reasons": [asdict(each) for each in change.reasons]}
