"""Fusion graphs side by side: stages down, graphs across, in each cell the kernels that hold the stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from compare.graph import formats
from compare.graph.ablation import Ablation, Region
from compare.graph.align import Alignment, Cell
from compare.graph.model import FusionGraph
from compare.graph.show import MOST_KERNELS, columns, plain
from compare.graph.totals import bytes_moved

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.tree import Tree

_MOST_NUMBERS = 6


def table(names: Sequence[str], graphs: Sequence[FusionGraph], alignment: Alignment) -> RenderableType:
    """One line a stage; numbers are the kernels', listed below with what each moves."""
    from rich import box
    from rich.console import Group
    from rich.table import Table

    grid = Table(box=box.SIMPLE_HEAD, expand=True, pad_edge=False, show_edge=False)
    inferred = any(row.inferred for row in alignment.rows)
    grid.add_column(plain("operation (inferred)" if inferred else "stage"), ratio=3, overflow="fold")
    for name in names:
        grid.add_column(plain(formats.name(name, 40)), ratio=4, overflow="fold")
    for row in alignment.rows:
        grid.add_row(plain(formats.name(row.label, 60)), *(plain(_cell(cell)) for cell in row.cells))
    parts: list[RenderableType] = [grid] if alignment.rows else [plain("nothing to align: no stages, no operations")]
    if inferred:
        parts.append(plain("\nNot all of them name stages: operations are matched by kind and dataflow order."))
    for name, graph, loose, kernels in zip(names, graphs, alignment.unaligned, alignment.unattributed, strict=True):
        parts.append(plain(""))
        parts.append(_legend(name, graph))
        if kernels:
            parts.append(plain(f"in no stage: {_numbers(kernels, MOST_KERNELS)}"))
        if loose:
            parts.append(plain(f"unaligned: {formats.words(formats.operation(op) for op in loose[:MOST_KERNELS])}"))
    return Group(*parts)


def _cell(cell: Cell) -> str:
    held = "its kernels are not known" if cell.kernels is None else _numbers(cell.kernels, _MOST_NUMBERS)
    relations = ", ".join(relation for relation in cell.relations if relation != "same region")
    return ": ".join(filter(None, (held, relations)))


def _numbers(indices: Sequence[int], most: int) -> str:
    more = f", … ({len(indices)})" if len(indices) > most else ""
    return ", ".join(str(index + 1) for index in indices[:most]) + more


def _legend(name: str, graph: FusionGraph) -> Tree:
    from rich.tree import Tree

    tree = Tree(plain(formats.name(name, 76), "bold"), guide_style="dim")
    for index, kernel in enumerate((graph.kernels or ())[:MOST_KERNELS]):
        row = columns(None, 12, 8, 10, right=(2, 3), gap=1)
        time = "" if kernel.device_time_us is None else formats.microseconds(kernel.device_time_us)
        row.add_row(
            plain(f"{index + 1}. {formats.name(kernel.name, 40)}"), plain(formats.name(kernel.kind, 12)),
            plain(formats.size(bytes_moved(kernel))), plain(time),
        )
        tree.add(row)
    hidden = len(graph.kernels or ()) - MOST_KERNELS
    if hidden > 0:
        tree.add(plain(f"… and {formats.count(hidden, 'more kernel')}"))
    return tree


def ablation(fused: str, unfused: str, found: Ablation) -> RenderableType:
    """What fusion buys, whole and region by region."""
    from rich.tree import Tree

    tree = Tree(plain(f"what fusion buys: {formats.name(fused, 30)} against {formats.name(unfused, 30)}", "bold"))
    tree.add(_region("all", found.total))
    for region in found.regions:
        tree.add(_region(", ".join(region.stages) or "no stage", region))
    for name, only in ((fused, found.only_fused), (unfused, found.only_unfused)):
        if only:
            words = f"in {formats.name(name, 30)} alone: {_numbers(only, MOST_KERNELS)}"
            tree.add(plain(words))
    return tree


def _region(label: str, region: Region) -> RenderableType:
    row = columns(None, 15, 22, right=(1, 2), gap=1)
    kernels = f"{len(region.unfused.kernels)} → {len(region.fused.kernels)} kernels"
    saved = formats.signed_size(None if region.bytes_saved is None else -region.bytes_saved)
    if region.time_saved_us is not None:
        saved += f", {-region.time_saved_us:+.1f} µs"
    row.add_row(plain(formats.name(label, 40)), plain(kernels), plain(saved))
    return row


def to_json(names: Sequence[str], alignment: Alignment) -> dict[str, Any]:
    return {"graphs": list(names), **asdict(alignment)}
