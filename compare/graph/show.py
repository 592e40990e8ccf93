"""A fusion graph in a terminal: kernels in launch order, in each its operations and their source lines.

Nothing is said by colour alone, and nothing that a file says reaches the terminal as a control sequence or as markup.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from compare.graph import formats
from compare.graph.model import Access, Buffer, FusionGraph, Kernel, Reason, SourceOp
from compare.graph.totals import Tally, bytes_moved, totals
from compare.report import printable

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text
    from rich.tree import Tree

    from compare.graph.roofline import Ceilings

MOST_KERNELS = 40  # a screen or two; of longer graphs only the costly kernels are shown
MOST_BUFFERS = 5
MOST_FINDINGS = 5
MOST_OPERATIONS = 200
PARTS = ("forward", "backward")


def text(graph: FusionGraph, width: int = 80) -> str:
    """The default view as lines of at most `width` columns, without colours."""
    return render(overview(graph, width=width, notes=sums(graph), remarks=remarks(graph)), width)


def render(view: RenderableType, width: int = 80) -> str:
    from rich.console import Console

    stream = io.StringIO()
    Console(file=stream, width=width, highlight=False, color_system=None, legacy_windows=False).print(view)
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines())


def overview(
    graph: FusionGraph, *, width: int = 80, every: bool = False, title: str | None = None, notes: Iterable[str] = (),
    remarks: Sequence[str] = (),
) -> RenderableType:
    """The graph as a tree: parts, kernels, operations by stage and line; below it what it writes for later.

    width: what names and places are shortened to fit. every: all kernels of a large graph instead of the costliest.
    title: instead of the graph's name. notes: lines to show below it. remarks: to show at the end.
    """
    tree = titled(title or graph.name, [formats.origin(graph), *notes])
    if graph.kernels is None:
        _add_operations(tree, graph.operations)
    else:
        shown = range(len(graph.kernels)) if every else costliest(graph, MOST_KERNELS)
        _add_parts(tree, graph, set(shown), width)
        if not graph.kernels:
            tree.add(plain("no kernels"))
    for label, buffers in kept(graph):
        _add_buffers(tree, label, buffers, graph, width)
    if graph.unparsed:
        branch = tree.add(plain(f"{formats.count(len(graph.unparsed), 'thing')} could not be read"))
        _add_some(branch, graph.unparsed, MOST_BUFFERS)
    if remarks:
        branch = tree.add(plain("what stands out", "bold"))
        for remark in remarks:
            branch.add(plain(printable(remark)))
    return tree


def stage(
    graph: FusionGraph, name: str, indices: Collection[int], *, width: int = 80, every: bool = False
) -> RenderableType:
    """The kernels that hold operations of a stage (`indices`), each with everything else that is in it."""
    kernels = graph.kernels or ()
    moved = total(bytes_moved(kernels[index]) for index in indices)
    traffic = total(map(bytes_moved, kernels))
    held = f"{name}: in {formats.count(len(indices), 'kernel')} of {len(kernels)}"
    bytes_ = f"which move {formats.size(moved)}, {formats.share(moved, traffic)} of all"
    tree = titled(graph.name, [formats.origin(graph), f"{held}, {bytes_}"])
    shown = indices if every else costliest(graph, MOST_KERNELS, indices)
    _add_parts(tree, graph, set(shown), width, others=False)
    if len(shown) < len(indices):
        tree.add(plain(f"… and {len(indices) - len(shown):,} of less cost; --all shows them"))
    return tree


def remarks(graph: FusionGraph, ceilings: Ceilings | None = None) -> list[str]:
    """What stands out in this graph alone, in words."""
    from compare.graph.findings import findings

    found = findings({graph.compiler: graph}, ceilings)[:MOST_FINDINGS]
    return [each.text if each.us is None else f"{each.text} ({formats.microseconds(each.us)})" for each in found]


def titled(title: str, lines: Iterable[str]) -> Tree:
    """A title with lines below it."""
    from rich.tree import Tree

    tree = Tree(plain(formats.name(title, 76), "bold"), guide_style="dim")
    for line in lines:
        tree.add(plain(printable(line)))
    return tree


def kept(graph: FusionGraph) -> list[tuple[str, list[Buffer]]]:
    """What is written only to be read again, largest first, under a title each; what there is none of is left out."""
    between = [buffer for buffer in graph.materialized if buffer.role != "saved"]
    lists = [
        ("saved for backward", sorted(graph.saved, key=lambda buffer: -buffer.bytes)),
        ("written by one kernel for another", between),
    ]
    return [(title, buffers) for title, buffers in lists if buffers]


def sums(
    graph: FusionGraph, ceilings: Ceilings | None = None, *, bytes_compulsory: Mapping[str, int] | None = None,
    precision: str | None = None,
) -> list[str]:
    """What the graph adds up to, in words; what is not known is left out, and what is incomplete says so.

    bytes_compulsory, precision: as in `totals`.
    """
    found = totals(graph, bytes_compulsory=bytes_compulsory, ceilings=ceilings, precision=precision)
    if found.kernels is None:
        return []
    compulsory = sum(found.compulsory.values())
    moved = f"moves {_tally(found.moved, formats.size)}, of which {formats.size(compulsory)} must move"
    if found.fusion_efficiency is not None:
        moved += f": fusion efficiency {found.fusion_efficiency:.0%}"
    lines = [moved]
    if found.gemm_barrier > compulsory:
        lines.append(f"with each product's result written and read once, {formats.size(found.gemm_barrier)} must move")
    if found.device_time_us is not None:
        time = f"takes {_tally(found.device_time_us, formats.microseconds)} on the device"
        if found.recoverable_us is not None:
            time += f", {_tally(found.recoverable_us, formats.microseconds)} above what its kernels take at least"
        lines.append(time)
    if found.block_floor_us is not None:
        lines.append(f"the function itself takes {formats.microseconds(found.block_floor_us)} at least")
    return lines


def _tally(tally: Tally, wording: Callable[[float], str]) -> str:
    if tally.unknown:
        return f"at least {wording(tally.value)} ({tally.unknown:,} not known)"
    return wording(tally.value)


def costliest(graph: FusionGraph, most: int, among: Collection[int] | None = None) -> list[int]:
    """Launch indices of the `most` kernels that take longest, or, where no times are known, move most."""
    kernels = graph.kernels or ()
    timed = any(kernel.device_time_us is not None for kernel in kernels)

    def cost(index: int) -> float:
        kernel = kernels[index]
        return (kernel.device_time_us if timed else _known_bytes(kernel)) or 0

    candidates = range(len(kernels)) if among is None else among
    return sorted(sorted(candidates, key=cost, reverse=True)[:most])


def plain(words: str, style: str = "") -> Text:
    """Text in which nothing is markup."""
    from rich.text import Text

    return Text(words, style=style, overflow="fold")


def columns(*widths: int | None, right: Sequence[int] = (), gap: int = 2) -> Table:
    """A grid without borders: fixed widths, None for what takes the rest; `right`: the columns aligned to it."""
    from rich.table import Table

    grid = Table.grid(padding=(0, gap, 0, 0), expand=True, pad_edge=False)
    for index, width in enumerate(widths):
        grid.add_column(
            width=width, ratio=None if width else 1, justify="right" if index in right else "left", overflow="fold"
        )
    return grid


def _add_parts(tree: Tree, graph: FusionGraph, shown: set[int], width: int, *, others: bool = True) -> None:
    """others: whether kernels that are not shown are counted where they run."""
    kernels = graph.kernels or ()
    whole = _Whole(
        total(map(bytes_moved, kernels)), total(kernel.device_time_us for kernel in kernels),
        _widths((op for kernel in kernels for op in kernel.source_ops), width), width,
    )
    for part in PARTS:
        indices = [index for index, kernel in enumerate(kernels) if kernel.part == part]
        if not indices or not (others or shown.intersection(indices)):
            continue
        timed = whole.time_us is not None
        title = f"{part}: {formats.count(len(indices), 'kernel')}"
        branch = tree.add(_row(title, "bytes", "share", "µs" if timed else "", "share" if timed else "", style="bold"))
        skipped: list[Kernel] = []
        for index in indices:
            if index not in shown:
                skipped.append(kernels[index])
                continue
            if others:
                _add_skipped(branch, skipped, whole)
            _add_kernel(branch, index, kernels[index], whole)
        if others:
            _add_skipped(branch, skipped, whole)


@dataclass(frozen=True)
class _Whole:
    """What shares are of, and how wide columns are."""

    traffic: float | None
    time_us: float | None
    widths: tuple[int, int]
    width: int


def _add_skipped(branch: Tree, skipped: list[Kernel], whole: _Whole) -> None:
    if skipped:
        size = total(map(bytes_moved, skipped))
        title = f"… {formats.count(len(skipped), 'kernel')} of less cost; --all shows them"
        branch.add(_row(title, formats.size(size), formats.share(size, whole.traffic), "", ""))
        skipped.clear()


def _add_kernel(branch: Tree, index: int, kernel: Kernel, whole: _Whole) -> None:
    from rich.console import Group

    moved, time = bytes_moved(kernel), kernel.device_time_us
    head = _row(
        f"{index + 1}. {formats.name(kernel.name, max(20, whole.width - 40))}",
        formats.size(moved), formats.share(moved, whole.traffic),
        formats.number_of_us(time), formats.share(time, whole.time_us), style="bold",
    )
    contents = _operations(kernel.source_ops, whole.widths)
    branch.add(Group(head, plain(" · ".join(facts(kernel)), "dim"), *contents))


def _row(title: str, size: str, of_bytes: str, us: str, of_time: str, style: str = "") -> Table:
    # "1.23 MB", "100%", "12345"
    grid = columns(None, 7, 5, 7, 5, right=(1, 2, 3, 4), gap=1)
    grid.add_row(plain(title, style), *(plain(cell) for cell in (size, of_bytes, us, of_time)))
    return grid


def facts(kernel: Kernel) -> list[str]:
    """What there is to say of a kernel beside its name, cost and contents."""
    found = [printable(kernel.kind, 20)]
    found.append(f"reads {formats.size(kernel.bytes_read)}, writes {formats.size(kernel.bytes_written)}")
    if kernel.launches != 1:
        many = "launches depend on data" if kernel.launches is None else f"each of {kernel.launches:,} launches"
        found.append(many)
    if kernel.provenance:
        found.append(printable(kernel.provenance, 40))
    return found


def operations(ops: Sequence[SourceOp]) -> list[tuple[str, str, str]]:
    """(stage, operations, "file:line") for each stage and line, in order of appearance."""
    groups: dict[tuple[str, str], list[str]] = {}
    for op in ops[:MOST_OPERATIONS]:
        groups.setdefault((op.stage, op.line), []).append(formats.operation(op))
    found = [(stage, formats.words(names), line) for (stage, line), names in groups.items()]
    more = len(ops) - MOST_OPERATIONS
    return [*found, ("", f"… and {more:,} more", "")] if more > 0 else found


def _operations(ops: Sequence[SourceOp], widths: tuple[int, int] | None = None) -> list[RenderableType]:
    if not ops:
        return []
    of_stage, of_line = widths or _widths(ops)
    grid = columns(*([of_stage] if of_stage else []), None, *([of_line] if of_line else []))
    before = None
    for stage, words, line in operations(ops):
        cells = [words]
        if of_stage:
            cells.insert(0, "" if stage == before else formats.name(stage, of_stage) if stage else "-")
        if of_line:
            cells.append(formats.place(line, of_line))
        grid.add_row(*map(plain, cells))
        before = stage
    return [grid]


def _widths(ops: Iterable[SourceOp], width: int = 80) -> tuple[int, int]:
    """Of the columns of stages and of lines: no wider than what is in them."""
    stages, lines = set(), set()
    for op in ops:
        stages.add(op.stage)
        lines.add(op.line)
    return min(width // 4, max(map(len, stages), default=0)), min(width * 3 // 8, max(map(len, lines), default=0))


def _add_operations(tree: Tree, ops: Sequence[SourceOp]) -> None:
    from rich.console import Group

    title = f"{formats.count(len(ops), 'operation')}; which kernels they become is known on a GPU alone"
    tree.add(Group(plain(title), *_operations(ops)))


def _add_buffers(tree: Tree, title: str, buffers: Sequence[Buffer], graph: FusionGraph, width: int) -> None:
    size = formats.size(sum(buffer.bytes for buffer in buffers))
    branch = tree.add(plain(f"{title}: {formats.count(len(buffers), 'buffer')}, {size}", "bold"))
    rows = [(buffer, formats.size(buffer.bytes), cause(buffer, graph)) for buffer in buffers[:MOST_BUFFERS]]
    add_rows(branch, rows, width)
    if len(buffers) > MOST_BUFFERS:
        branch.add(plain(f"… and {len(buffers) - MOST_BUFFERS} more"))


def add_rows(branch: Tree, rows: Sequence[tuple[Buffer, str, str]], width: int = 80) -> None:
    """Buffers with their shapes, a size, and what else there is to say, a place for example."""
    shapes = [formats.shape(buffer) for buffer, _, _ in rows]
    of_shape = min(max(map(len, shapes)), width // 4)
    left = max(16, width - 8 - of_shape - 8 - 3)  # two levels of the tree, a size, three gaps
    of_name = min(max(len(buffer.name) for buffer, _, _ in rows), left // 2)
    of_rest = min(max(len(rest) for _, _, rest in rows), left - of_name) or 1
    for shape, (buffer, size, rest) in zip(shapes, rows, strict=True):
        grid = columns(None, of_shape, 8, of_rest, right=(2,), gap=1)
        cells = formats.name(buffer.name, of_name), formats.name(shape, of_shape), size, formats.place(rest, of_rest)
        grid.add_row(*map(plain, cells))
        branch.add(grid)


def cause(buffer: Buffer, graph: FusionGraph) -> str:
    """The source line of the last operation in the first kernel that writes the buffer; "" where none is known."""
    writers = graph.producers.get(buffer.name, ())
    lines = [op.line for op in (graph.kernels or ())[writers[0]].source_ops if op.line] if writers else []
    return lines[-1] if lines else ""


def kernel(graph: FusionGraph, index: int, *, width: int = 80) -> RenderableType:
    """Everything about one kernel: its buffers with who else uses them, its operations, and why it ends where it does.
    """
    from rich.tree import Tree

    subject = (graph.kernels or ())[index]
    tree = Tree(plain(f"{index + 1}. {printable(subject.name)}", "bold"), guide_style="dim")
    known = [*facts(subject), printable(subject.part)]
    if subject.device_time_us is not None:
        known.append(formats.microseconds(subject.device_time_us))
    if subject.flops is not None:
        known.append(f"{subject.flops:.4g} FLOPs")
    if subject.workspace_bytes:
        known.append(f"{formats.size(subject.workspace_bytes)} workspace")
    tree.add(plain(" · ".join(known)))
    if subject.runtime_name:
        tree.add(plain(f"profilers call it {printable(subject.runtime_name)}"))
    for name, value in subject.facts.items():
        tree.add(plain(printable(f"{name}: {value}")))
    if subject.source_ops:
        from rich.console import Group

        tree.add(Group(plain("operations", "bold"), *_operations(subject.source_ops)))
    _add_accesses(tree, "reads", subject.inputs, graph, width)
    _add_accesses(tree, "writes", subject.outputs, graph, width)
    reasons = [reason for reason in graph.reasons if subject.name in (reason.producer, reason.consumer)]
    if reasons:
        branch = tree.add(plain("not one kernel with", "bold"))
        for reason in reasons:
            branch.add(plain(_other_side(reason, subject.name)))
    return tree


def _other_side(reason: Reason, name: str) -> str:
    other, side = (reason.consumer, "consumer") if reason.producer == name else (reason.producer, "producer")
    known = formats.name(other) if other else "unknown"
    return f"{known} ({side}): {reason.code}: {printable(reason.text, 200)} ({printable(reason.origin)})"


def _add_accesses(
    tree: Tree, title: str, accesses: tuple[Access, ...] | None, graph: FusionGraph, width: int
) -> None:
    if not accesses:
        tree.add(plain(f"{title} nothing" if accesses is not None else f"{title}: not known"))
        return
    others = graph.producers if title == "reads" else graph.consumers
    rows = []
    for access in accesses:
        buffer = graph.buffer[access.buffer]
        relation = str(buffer.role)
        if users := ", ".join(str(index + 1) for index in others.get(access.buffer, ())[:8]):
            relation += f", {'from' if title == 'reads' else 'to'} {users}"
        if access.bytes not in (None, buffer.bytes):
            relation += f", of {formats.size(buffer.bytes)}"
        rows.append((buffer, formats.size(access.bytes), relation))
    add_rows(tree.add(plain(title, "bold")), rows, width)


def _add_some(branch: Tree, lines: Sequence[str], most: int) -> None:
    for line in lines[:most]:
        branch.add(plain(printable(line, 200)))
    if len(lines) > most:
        branch.add(plain(f"… and {len(lines) - most:,} more"))


def _known_bytes(kernel: Kernel) -> int:
    return sum(formats.weight(access, kernel) for access in (*(kernel.inputs or ()), *(kernel.outputs or ())))


def total(values: Iterable[float | None]) -> int | float | None:
    """Of what is known; None where nothing is."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None
