"""Fusion graphs side by side: a row for each stage, a column for each graph, kernel numbers in the cells."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from .. import formats
from ..analyse.ablation import Ablation, Region
from ..analyse.align import Alignment, Cell
from ..analyse.totals import declared_bytes
from ..model import FusionGraph
from .text_view import MOST_KERNELS, add_some, in_columns, numbers, plain

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.tree import Tree

_MOST_NUMBERS = 6


def table(names: Sequence[str], graphs: Sequence[FusionGraph], alignment: Alignment) -> RenderableType:
    """Return a table with one line for each stage. The numbered kernels follow, with their declared bytes."""
    from rich import box
    from rich.console import Group
    from rich.table import Table

    grid = Table(box=box.SIMPLE_HEAD, expand=True, pad_edge=False, show_edge=False)
    inferred = any(row.inferred for row in alignment.rows)
    grid.add_column(plain("operation (inferred)" if inferred else "stage"), ratio=3, overflow="fold")
    for name in names:
        grid.add_column(plain(formats.name(name, 40)), ratio=4, overflow="fold")
    for row in alignment.rows:
        grid.add_row(plain(formats.name(row.label, 60)), *(plain(kernels_in(cell)) for cell in row.cells))
    sections: list[RenderableType] = [grid] if alignment.rows else [plain("nothing to align: no stages, no operations")]
    if meanings := [f"{word}: {meaning}" for word, meaning in _WORDS.items() if _occurs(word, alignment)]:
        sections.append(plain("\n".join(["\nCompared with the first graph that holds the stage:", *meanings]), "dim"))
    if inferred:
        sections.append(plain("\nToo few graphs name stages, so operations are matched by kind and dataflow order."))
    for name, graph, loose, kernels in zip(names, graphs, alignment.unaligned, alignment.unattributed, strict=True):
        sections.append(plain(""))
        sections.append(_legend(name, graph))
        if kernels:
            words = "without a matched operation" if inferred else "in no stage"
            sections.append(plain(f"{words}: {numbers(kernels, MOST_KERNELS)}"))
        if loose:
            sections.append(plain(f"unaligned: {formats.words(formats.operation(op) for op in loose[:MOST_KERNELS])}"))
    return Group(*sections)


# Relations of a stage to the first graph that holds it.
_WORDS = {
    "split": "in more kernels",
    "merged": "in fewer kernels",
    "joined": "in as many kernels, with stages that are separate there",
    "parted": "in as many kernels, without stages that are together with it there",
    "regrouped": "in as many kernels, both joined and parted",
    "recomputed": "in a kernel that computes it again",
    "absent": "in no kernel",
    "not named": "in no known kernel; some kernels name no stage",
    "names no stages": "no kernel of this graph names a stage",
}


def _occurs(word: str, alignment: Alignment) -> bool:
    return any(word in cell.relations for row in alignment.rows for cell in row.cells)


def kernels_in(cell: Cell) -> str:
    held = "kernels unknown" if cell.kernels is None else numbers(cell.kernels, _MOST_NUMBERS)
    relations = ", ".join(relation for relation in cell.relations if relation != "same region")
    return ": ".join(filter(None, (held, relations)))


def _legend(name: str, graph: FusionGraph) -> Tree:
    from rich.tree import Tree

    tree = Tree(plain(formats.name(name, 76), "bold"), guide_style="dim")
    kernels = graph.kernels or ()
    rows = [
        in_columns(
            (f"{number}. {formats.name(kernel.name, 40)}", formats.name(kernel.kind, 12),
             formats.size(declared_bytes(kernel)),
             "" if kernel.device_time_us is None else formats.microseconds(kernel.device_time_us)),
            (None, 12, 8, 10), right=(2, 3),
        )
        for number, kernel in enumerate(kernels[:MOST_KERNELS], 1)
    ]
    add_some(tree, rows, len(kernels) - MOST_KERNELS, "more kernels")
    return tree


def ablation(fused: str, unfused: str, found: Ablation) -> RenderableType:
    """Return what fusion saves, in total and by region, without regions that it hardly changes."""
    from rich.tree import Tree

    title = f"what fusion saves: {formats.name(fused, 30)} compared with {formats.name(unfused, 30)}"
    tree = Tree(plain(title, "bold"))
    tree.add(_region("all", found.total))
    shown = [region for region in found.regions if _matters(region, found.total)]
    names = [", ".join(region.stages) or "no stage" for region in shown]
    several = {name for name, times in Counter(names).items() if times > 1}
    for label, region in zip(names, shown, strict=True):
        tree.add(_region(f"{' and '.join(region.phases)}: {label}" if label in several else label, region))
    if same := len(found.regions) - len(shown):
        tree.add(plain(f"{formats.count(same, 'more region')} with as many kernels and about the same bytes"))
    for name, only in ((fused, found.only_fused), (unfused, found.only_unfused)):
        if only:
            tree.add(plain(f"only in {formats.name(name, 30)}: {numbers(only, MOST_KERNELS)}"))
    return tree


_SIGNIFICANT = 1e-3  # of the unfused graph's bytes; ten times that of its time, which varies from run to run


def _matters(region: Region, total: Region) -> bool:
    """Return whether fusion changes the region's kernels, bytes or time."""
    if len(region.fused.kernels) != len(region.unfused.kernels):
        return True
    if region.bytes_saved is None or abs(region.bytes_saved) > _SIGNIFICANT * total.unfused.declared.value:
        return True
    whole = total.unfused.device_time_us
    saved = region.time_saved_us
    return saved is not None and whole is not None and abs(saved) > 10 * _SIGNIFICANT * whole.value


def _region(label: str, region: Region) -> RenderableType:
    before, after = len(region.unfused.kernels), len(region.fused.kernels)
    kernels = f"{before} → {after} {'kernel' if before == after == 1 else 'kernels'}"
    saved = formats.signed_size(None if region.bytes_saved is None else -region.bytes_saved)
    if region.time_saved_us is not None:
        saved += f", {-region.time_saved_us:+.1f} µs"
    return in_columns((formats.name(label, 40), kernels, saved), (None, 15, 22), right=(1, 2))


def to_json(names: Sequence[str], alignment: Alignment) -> dict[str, Any]:
    """Return the alignment as JSON."""
    return {"graphs": list(names), **asdict(alignment)}
