"""A fusion graph in a terminal: kernels in launch order, with their operations and source lines.

Colour never carries information alone. No text of a file reaches the terminal as a control sequence or as markup.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

from ...base.text import printable
from .. import formats
from ..analyse import products
from ..analyse.call_time import known_call_time
from ..analyse.exchange import COPY, exchange_of
from ..analyse.missed_fusions import missed
from ..analyse.roofline import roofline_time_us
from ..analyse.totals import declared_bytes, known_declared_bytes, tally, totals
from ..join.kernel_records import SPLIT_K
from ..join.measured import COUNTED
from ..model import PHASES, Access, Buffer, FusionGraph, Kernel, Launch, Reason, SourceOp
from ..operations import cause_text

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text
    from rich.tree import Tree

    from ..analyse.roofline import Ceilings

MOST_KERNELS = 40  # one or two screens; a longer graph shows only its costly kernels
MOST_BUFFERS = 5
MOST_FINDINGS = 5
MOST_OPERATIONS = 200
MOST_WORDS = 1000  # characters of a sentence
_BELOW = "part of the data came from L2, or memory is faster than the copy that measured it"


def text(graph: FusionGraph, width: int = 80) -> str:
    """Return the default view as lines of at most `width` columns, without colours."""
    return render(overview(graph, width=width, notes=totals_lines(graph), remarks=finding_lines(graph)), width)


def render(view: RenderableType, width: int = 80) -> str:
    from rich.console import Console

    stream = io.StringIO()
    Console(  # which in a notebook would display the text, and leave the stream empty
        file=stream, width=width, highlight=False, color_system=None, legacy_windows=False, force_jupyter=False
    ).print(view)
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines())


def overview(
    graph: FusionGraph, *, width: int = 80, every: bool = False, title: str | None = None, notes: Iterable[str] = (),
    remarks: Sequence[str] = (),
) -> RenderableType:
    """Return the graph as a tree: phases, kernels, operations by stage and line, and the buffers between kernels.

    width: columns that names and places are shortened to.
    every: show all kernels of a large graph instead of the costliest.
    title: replaces the graph's name.
    notes: lines below the title.
    remarks: lines at the end.
    """
    from rich.console import Group

    tree = titled(title or graph.name, [formats.origin(graph), *graph.notes, *notes])
    if graph.kernels is None:
        unknown = f"{formats.count(len(graph.operations), 'operation')}; only a GPU tells which kernels they become"
        tree.add(Group(plain(unknown), *_operations(graph.operations)))
    else:
        shown = range(len(graph.kernels)) if every else costliest(graph, MOST_KERNELS)
        _add_phases(tree, graph, set(shown), width)
        if not graph.kernels:
            tree.add(plain("no kernels"))
    for label, buffers in buffer_lists(graph):
        add_buffers(tree, label, buffers, graph, width=width)
    if graph.unparsed:
        branch = tree.add(plain(f"{formats.count(len(graph.unparsed), 'thing')} could not be read"))
        unread = [printable(line, 200) for line in graph.unparsed[:MOST_BUFFERS]]
        add_some(branch, unread, len(graph.unparsed) - MOST_BUFFERS)
    if remarks:
        add_some(tree.add(plain("what stands out", "bold")), [printable(remark, MOST_WORDS) for remark in remarks])
    return tree


def stage(
    graph: FusionGraph, name: str, indices: Collection[int], *, width: int = 80, every: bool = False
) -> RenderableType:
    """Return a view of the kernels that hold operations of a stage (`indices`), with all their other operations."""
    kernels = graph.kernels or ()
    declared = tally(declared_bytes(kernels[index]) for index in indices)
    of_all = formats.share(declared.exact, tally(map(declared_bytes, kernels), len(graph.unparsed)).exact)
    held = f"{name}: in {formats.count(len(indices), 'kernel')} of {len(kernels)}"
    size = f"{declared.in_words(formats.size)} declared" + (f", {of_all} of all" if of_all else "")
    tree = titled(graph.name, [formats.origin(graph), f"{held}, {size}"])
    shown = indices if every else costliest(graph, MOST_KERNELS, indices)
    _add_phases(tree, graph, set(shown), width, others=False)
    add_some(tree, (), len(indices) - len(shown), "cheaper ones; --all shows them")
    return tree


def finding_lines(graph: FusionGraph, ceilings: Ceilings | None = None, *, name: str | None = None) -> list[str]:
    """Return the first findings about this graph. name: replaces its compiler's name in the sentences."""
    from ..findings.collect import findings

    return list(map(str, findings({name or graph.compiler: graph}, ceilings)[:MOST_FINDINGS]))


def titled(title: str, lines: Iterable[str]) -> Tree:
    """Return a tree with a title and lines below it."""
    from rich.tree import Tree

    tree = Tree(plain(formats.name(title, 76), "bold"), guide_style="dim")
    add_some(tree, [printable(line, MOST_WORDS) for line in lines])
    return tree


def buffer_lists(graph: FusionGraph) -> list[tuple[str, list[Buffer]]]:
    """Return titled lists of the buffers that kernels write for other kernels, largest first, without empty lists."""
    sums = products.partial_sums(graph)
    between = [buffer for buffer in graph.materialized if buffer.role != "saved" and buffer.name not in sums]
    unread = [buffer for buffer in between if not graph.consumers.get(buffer.name)]
    saved = sorted(graph.saved, key=lambda buffer: -buffer.bytes)
    backward = {index for index, kernel in enumerate(graph.kernels or ()) if kernel.phase == "backward"}
    needed = [b for b in saved if not backward or backward.intersection(graph.consumers.get(b.name, ()))]
    lists = [
        ("saved for backward", needed),
        ("saved for backward, but never read", [buffer for buffer in saved if buffer not in needed]),
        ("written by one kernel for another", [b for b in between if graph.consumers.get(b.name)]),
        ("partial sums of split-K products", [b for b in graph.materialized if b.name in sums]),
        ("read to choose a branch or to end a loop", [b for b in unread if b.decides]),
        ("written and never read", [b for b in unread if not b.decides]),
    ]
    return [(title, buffers) for title, buffers in lists if buffers]


def totals_lines(
    graph: FusionGraph, ceilings: Ceilings | None = None, *, bytes_compulsory: Mapping[str, int] | None = None,
    flops_declared: Mapping[str, float] | None = None, call_us: float | None = None,
) -> list[str]:
    """Return the graph's totals as lines. Unknown totals are left out; incomplete ones say so.

    bytes_compulsory, flops_declared: as in `totals`. call_us: the device time of a call, with gaps.
    """
    found = totals(graph, bytes_compulsory=bytes_compulsory, flops_declared=flops_declared, ceilings=ceilings)
    if found.kernels is None:
        return []
    rates = f" at the rates of the {ceilings.data_sheet}" if ceilings is not None and ceilings.data_sheet else ""
    least = "at least " if found.open_ended else ""
    compulsory = sum(found.compulsory.values())
    traffic = f"declared bytes: {found.declared.in_words(formats.size)}"
    traffic += f"; compulsory bytes: {least}{formats.size(compulsory)}"
    if found.fusion_efficiency is not None:
        traffic += f"; fusion efficiency: {formats.share(found.fusion_efficiency, 1)}"
    lines = [traffic]
    if found.gemm_barrier is not None and found.gemm_barrier > compulsory:
        barrier = f"{least}{formats.size(found.gemm_barrier)}"
        lines.append(f"compulsory if each product's result passes through memory: {barrier}")
    if found.device_time_us is not None:
        time = f"the kernels' times add up to {found.device_time_us.in_words(formats.microseconds)}"
        if found.recoverable_us is not None:
            time += f", {found.recoverable_us.in_words(formats.microseconds)} above their roofline times"
        lines.append(time)
    else:
        if predicted := predicted_words(graph):
            lines.append(f"a call is predicted to take {predicted} on the device")
        if found.roofline_time_us is not None:
            roofline = found.roofline_time_us.in_words(formats.microseconds)
            lines.append(f"the kernels' roofline times add up to {roofline}{rates}")
    if cycles := sum(_estimated_cycles(kernel) for kernel in graph.kernels or ()):
        lines.append(f"the compiler estimates {cycles:,} cycles for the kernels, without asynchronous copies")
    if call_us is not None:
        span = formats.microseconds(call_us)
        lines.append(f"a call takes {span} on the device, from the first kernel to the last of each phase")
    if found.below_roofline:
        faster = "kernel {} is faster than its roofline time" if len(found.below_roofline) == 1 else (
            "kernels {} are faster than their roofline times"
        )
        lines.append(f"{faster.format(numbers(found.below_roofline, 8))}: {_BELOW}")
    if found.block_roofline_time_us is not None:
        whole = formats.microseconds(found.block_roofline_time_us)
        lines.append(f"roofline time of the whole function: {whole}{rates}")
    return lines


def predicted_words(graph: FusionGraph) -> str:
    """Return "~101 µs (90 to 115)" for a call, with the number of kernels not in it; "" without a prediction."""
    time, unknown = known_call_time(graph)
    if not time.us:
        return ""
    missing, words = unknown + len(graph.unparsed), formats.predicted(time)
    return f"at least {words} ({missing:,} not predicted)" if missing else words


def numbers(indices: Sequence[int], most: int) -> str:
    """Return kernels by the numbers that views show: "1, 2, … (9)"."""
    more = f", … ({len(indices)})" if len(indices) > most else ""
    return ", ".join(str(index + 1) for index in indices[:most]) + more


def _estimated_cycles(kernel: Kernel) -> int:
    """Return the cycles of all launches of a call, as the compiler estimates them; 0 where it gives no estimate."""
    cycles = kernel.facts.get(_CYCLES)
    return cycles * kernel.certain_launches if isinstance(cycles, int) else 0


def costliest(graph: FusionGraph, most: int, among: Collection[int] | None = None) -> list[int]:
    """Return the launch indices of the `most` slowest kernels, or of those with most bytes where no time is known."""
    kernels = graph.kernels or ()
    timed = any(kernel.device_time_us is not None for kernel in kernels)

    def cost(index: int) -> float:
        kernel = kernels[index]
        return (kernel.device_time_us if timed else known_declared_bytes(kernel)) or 0

    candidates = range(len(kernels)) if among is None else among
    return sorted(sorted(candidates, key=cost, reverse=True)[:most])


def plain(words: str, style: str = "") -> Text:
    """Return text without markup."""
    from rich.text import Text

    return Text(words, style=style, overflow="fold")


def add_some(branch: Tree, lines: Iterable[str | Table], hidden: int = 0, more: str = "more") -> None:
    """Add lines, and the number of those that are hidden."""
    for line in lines:
        branch.add(plain(line) if isinstance(line, str) else line)
    if hidden > 0:
        branch.add(plain(f"… and {hidden:,} {more}"))


def in_columns(
    cells: Sequence[str], widths: Sequence[int | None], right: Sequence[int] = (), style: str = ""
) -> Table:
    """Return one line of cells in the columns of `columns`. style: of the first cell."""
    grid = columns(*widths, right=right, gap=1)
    grid.add_row(plain(cells[0], style), *map(plain, cells[1:]))
    return grid


def columns(*widths: int | None, right: Sequence[int] = (), gap: int = 2) -> Table:
    """Return a grid without borders. widths: None for the column that takes the rest. right: right-aligned columns."""
    from rich.table import Table

    grid = Table.grid(padding=(0, gap, 0, 0), expand=True, pad_edge=False)
    for index, width in enumerate(widths):
        grid.add_column(
            width=width, ratio=None if width else 1, justify="right" if index in right else "left", overflow="fold"
        )
    return grid


def _add_phases(tree: Tree, graph: FusionGraph, shown: set[int], width: int, *, others: bool = True) -> None:
    """Add the phases with their kernels. others: count the hidden kernels at their places."""
    kernels = graph.kernels or ()
    timed = graph.measured or any(kernel.predicted_us is not None for kernel in kernels)
    whole = _Whole(
        tally(map(declared_bytes, kernels), len(graph.unparsed)).exact,
        tally(kernel.device_time_us if graph.measured else kernel.predicted_us for kernel in kernels).exact,
        not graph.measured,
        _widths((op for kernel in kernels for op in kernel.source_ops), width), width,
    )
    described = products.described(graph)
    for phase in PHASES:
        indices = [index for index, kernel in enumerate(kernels) if kernel.phase == phase]
        if not indices or not (others or shown.intersection(indices)):
            continue
        title = f"{phase}: {formats.count(len(indices), 'kernel')}"
        branch = tree.add(_row(title, "bytes", "share", "µs" if timed else "", "share" if timed else "", style="bold"))
        for are_shown, adjacent in groupby(indices, key=shown.__contains__):
            if are_shown:
                for index in adjacent:
                    _add_kernel(branch, index, kernels[index], whole, described.get(index))
            elif others:
                skipped = [kernels[index] for index in adjacent]
                size = tally(map(declared_bytes, skipped)).exact
                title = f"… {formats.count(len(skipped), 'cheaper kernel')}; --all shows them"
                branch.add(_row(title, formats.size(size), formats.share(size, whole.traffic), "", ""))


@dataclass(frozen=True)
class _Whole:
    """The totals that shares refer to (None where they are unknown), and the widths of columns.

    predicted: its times are predictions, because no kernel was measured.
    """

    traffic: float | None
    time_us: float | None
    predicted: bool
    widths: tuple[int, int]
    width: int


def _add_kernel(branch: Tree, index: int, kernel: Kernel, whole: _Whole, product: str | None) -> None:
    from rich.console import Group

    size = declared_bytes(kernel)
    if whole.predicted:
        time, of_time = formats.about_us(kernel.predicted), formats.share(kernel.predicted_us, whole.time_us)
    else:
        time = formats.number_of_us(kernel.device_time_us)
        of_time = formats.share(kernel.device_time_us, whole.time_us)
    head = _row(
        f"{index + 1}. {formats.name(kernel.name, max(20, whole.width - 40))}",
        formats.size(size), formats.share(size, whole.traffic), time, of_time, style="bold",
    )
    contents = _operations(kernel.source_ops, whole.widths)
    branch.add(Group(head, plain(" · ".join(facts(kernel, product)), "dim"), *contents))


def _row(title: str, size: str, of_bytes: str, us: str, of_time: str, style: str = "") -> Table:
    # "1.23 MB", "100%", "12345"
    return in_columns((title, size, of_bytes, us, of_time), (None, 7, 5, 7, 5), (1, 2, 3, 4), style)


def facts(kernel: Kernel, product: str | None = None) -> list[str]:
    """Return a kernel's properties besides its name, cost and operations. product: from `products.described`."""
    found = [
        printable(kernel.kind, 20), *remarks(kernel, product),
        f"reads {formats.size(kernel.bytes_read)}, writes {formats.size(kernel.bytes_written)}",
    ]
    if branches := kernel.facts.get(_BRANCHES):
        names = [f"branch {index + 1} of {of} of {formats.name(name)}" for name, index, of in branches]
        found.append(f"0 or more launches, in {', '.join(names)}")
    elif kernel.launches != 1 and _SORT not in kernel.facts:
        unknown = "its launches are unknown" if kernel.kind == "library" else "launches depend on data"
        unknown += f", at least {kernel.least_launches:,}" if kernel.least_launches else ""
        found.append(unknown if kernel.launches is None else f"each of {kernel.launches:,} launches")
    if kernel.provenance:
        found.append(printable(kernel.provenance, 40))
    if kernel.runtime_name and kernel.name.startswith("aten."):  # tells several kernels of one operation apart
        found.append(formats.runtime(kernel.runtime_name))
    return found + [
        f"measured {'alone' if method == 'alone' else 'in the call'}: reads {formats.size(counts['dram_read'])}, "
        f"writes {formats.size(counts['dram_written'])}, {formats.size(counts['l2'])} through L2"
        for method, counts in kernel.facts.get(COUNTED, {}).items()
    ]


# The keys in Kernel.facts.
_OTHER_MEMORY, _SORT, _CYCLES = "other_memory", "sort_launches", "estimated_cycles"
_ESTIMATES = "xla_estimates_us"
_BRANCHES, _IF_TAKEN = "branches", "launches_if_taken"


def remarks(kernel: Kernel, product: str | None = None) -> list[str]:
    """Return the kernel's kind of product, what it sends to other GPUs, its bytes in other memories, the compiler's
    estimates, a sort's launches."""
    found = [product] if product else []
    helpers = kernel.facts.get("with")
    names = [kernel.runtime_name or "", *(map(str, helpers) if isinstance(helpers, dict) else ())]
    if any(map(SPLIT_K.search, names)):
        found.append("split-K, its partial sums in the library's workspace")
    if exchange := exchange_of(kernel):
        does = "one copies" if exchange.opcode == COPY else "each sends"
        found.append(f"{exchange.gpus} GPUs, {does} {formats.size(exchange.sent_bytes)}")
    elsewhere = kernel.facts.get(_OTHER_MEMORY)
    if isinstance(elsewhere, dict):
        found += [f"moves {formats.size(size)} of {printable(space, 20)} memory" for space, size in elsewhere.items()]
    if isinstance(cycles := kernel.facts.get(_CYCLES), int):
        found.append(f"{cycles:,} cycles, as the compiler estimates")
    if isinstance(estimates := kernel.facts.get(_ESTIMATES), dict) and estimates:
        known = (f"{formats.microseconds(us)} ({printable(model, 40)})" for model, us in estimates.items())
        found.append(f"XLA's cost models expect {', '.join(known)}")
    if sort := kernel.facts.get(_SORT):
        found.append(_sort_launches(sort))
    return found


_THUNKS = {"kCustomKernel": ("kernel",), "kKernel": ("kernel",), "kCopy": ("copy", "copies")}


def _sort_launches(thunks: Any) -> str:
    if not isinstance(thunks, dict):
        return "a sort of an unknown number of launches; bytes of one pass"
    words = [
        formats.count(number, *_THUNKS.get(kind, (printable(str(kind), 40),)))
        for kind, number in thunks.items() if isinstance(number, int)
    ]
    return f"a sort in {' and '.join(words)}; bytes of one pass"


def operations(ops: Sequence[SourceOp]) -> list[tuple[str, str, str]]:
    """Return (stage, operations, "file:line") for each stage and line, in order of appearance."""
    groups: dict[tuple[str, str], list[str]] = {}
    for op in ops[:MOST_OPERATIONS]:
        groups.setdefault((op.stage, op.users_line), []).append(formats.operation(op))
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
    """Return the widths of the columns for stages and lines, no wider than their contents."""
    stages, lines = set(), set()
    for op in ops:
        stages.add(op.stage)
        lines.add(op.users_line)
    return min(width // 4, max(map(len, stages), default=0)), min(width * 3 // 8, max(map(len, lines), default=0))


def add_buffers(
    tree: Tree, title: str, buffers: Sequence[Buffer], graph: FusionGraph, *, most: int = MOST_BUFFERS,
    size: Callable[[int], str] = formats.size, width: int = 80,
) -> None:
    """Add a branch of buffers with their sizes and the operations that they come from."""
    total = formats.size(sum(buffer.bytes for buffer in buffers))
    branch = tree.add(plain(f"{title}: {formats.count(len(buffers), 'buffer')}, {total}", "bold"))
    rows = [(buffer, size(buffer.bytes), cause_text(graph, buffer.name)) for buffer in buffers[:most]]
    add_some(branch, _buffer_rows(rows, width), len(buffers) - most)


def _buffer_rows(rows: Sequence[tuple[Buffer, str, str]], width: int) -> list[str | Table]:
    """Return buffers with their shapes, a size, and one more text such as a place."""
    shapes = [formats.shape(buffer) for buffer, _, _ in rows]
    of_shape = min(max(map(len, shapes)), width // 4)
    left = max(16, width - 8 - of_shape - 8 - 3)  # two levels of the tree, a size, three gaps
    names = max(len(buffer.name) for buffer, _, _ in rows)
    of_rest = min(max(len(rest) for _, _, rest in rows), max(left - names, left // 2)) or 1
    of_name = min(names, left - of_rest)
    return [
        in_columns(
            (formats.name(buffer.name, of_name), formats.name(shape, of_shape), size, formats.place(rest, of_rest)),
            (None, of_shape, 8, of_rest), right=(2,),
        )
        for shape, (buffer, size, rest) in zip(shapes, rows, strict=True)
    ]


def kernel(
    graph: FusionGraph, index: int, *, width: int = 80, ceilings: Ceilings | None = None, why: Sequence[str] = ()
) -> RenderableType:
    """Return all details of one kernel: buffers with their other users, operations, and reasons for missed fusions.

    With ceilings also its roofline time. why: what drives its predicted time, in words.
    """
    from rich.tree import Tree

    shown = (graph.kernels or ())[index]
    tree = Tree(plain(f"{index + 1}. {printable(shown.name)}", "bold"), guide_style="dim")
    known = [*facts(shown, products.described(graph).get(index)), printable(shown.phase)]
    if shown.device_time_us is not None:
        known.append(f"measured {formats.microseconds(shown.device_time_us)}")
    if shown.flops is not None:
        known.append(formats.flops(shown.flops))
    if shown.workspace_bytes:
        known.append(f"{formats.size(shown.workspace_bytes)} workspace")
    tree.add(plain(f"in {printable(graph.name)}"))
    tree.add(plain(" · ".join(known)))
    roofline = None if ceilings is None else roofline_time_us(graph, shown, ceilings)
    if roofline is not None:
        below = index in totals(graph, ceilings=ceilings).below_roofline
        faster = f"; the kernel is faster: {_BELOW}" if below else ""
        tree.add(plain(f"roofline time {formats.microseconds(roofline)}{faster}"))
    if (predicted := shown.predicted) is not None:
        time = formats.predicted(predicted)
        add_some(tree.add(plain(time if predicted.us is None else f"predicted {time}")), why)
    if shown.runtime_name:
        tree.add(plain(f"profilers call it {printable(shown.runtime_name)}"))
    if words := launch_words(shown.launch):
        tree.add(plain(printable(f"launched with {'; '.join(words)}")))
    for name, value in shown.facts.items():
        if name in (COUNTED, _OTHER_MEMORY, _SORT, _CYCLES, _ESTIMATES, _BRANCHES, _IF_TAKEN, "split_k"):
            continue  # `facts` shows them in words
        if name == "config" and shown.launch.config:
            continue
        listed = ", ".join(map(str, value)) if isinstance(value, list | tuple) else value
        tree.add(plain(printable(f"{name}: {listed}")))
    if shown.source_ops:
        from rich.console import Group

        tree.add(Group(plain("operations", "bold"), *_operations(shown.source_ops)))
    _add_accesses(tree, "reads", shown.inputs, graph, width)
    _add_accesses(tree, "writes", shown.outputs, graph, width)
    reasons = [reason for reason in missed(graph) if shown.name in (reason.producer, reason.consumer)]
    if reasons:
        add_some(tree.add(plain("not fused with", "bold")), [_other_side(reason, shown.name) for reason in reasons])
    return tree


def launch_words(launch: Launch) -> list[str]:
    """Return the known fields of a launch in words: numbers, configuration, differences between launches."""

    def extent(blocks: Sequence[int]) -> str:
        return "×".join(f"{size:,}" for size in blocks)

    numbers = [
        launch.grid and f"{extent(launch.grid)} blocks", launch.block and f"{extent(launch.block)} threads",
        None if launch.registers is None else f"{launch.registers} registers",
        None if launch.shared_bytes is None else f"{formats.size(launch.shared_bytes)} shared memory a block",
        None if launch.local_bytes is None else f"{formats.size(launch.local_bytes)} local memory a thread",
    ]
    words = [", ".join(filter(None, numbers)), ", ".join(f"{k} {v}" for k, v in (launch.config or {}).items())]
    words += [
        f"launches differ in {name}: {', '.join(map(str, values))}" for name, values in (launch.differing or {}).items()
    ]
    return list(filter(None, words))


def _other_side(reason: Reason, name: str) -> str:
    other, side = (reason.consumer, "consumer") if reason.producer == name else (reason.producer, "producer")
    known = formats.name(other) if other else "unknown"
    return f"{known} ({side}): {reason.code}: {printable(reason.text, 200)} ({printable(reason.origin)})"


def _add_accesses(
    tree: Tree, title: str, accesses: tuple[Access, ...] | None, graph: FusionGraph, width: int
) -> None:
    if not accesses:
        tree.add(plain(f"{title} nothing" if accesses is not None else f"{title}: unknown"))
        return
    others = graph.producers if title == "reads" else graph.consumers
    rows = []
    for access in accesses:
        buffer = graph.buffer[access.buffer]
        relation = str(buffer.role)
        if users := others.get(access.buffer, ()):
            relation += f", {'from' if title == 'reads' else 'to'} {numbers(users, 8)}"
        if buffer.decides:
            relation += f", decides {printable(buffer.decides, 60)}"
        if access.bytes not in (None, buffer.bytes):
            relation += f", of {formats.size(buffer.bytes)}"
        rows.append((buffer, formats.size(access.bytes), relation))
    add_some(tree.add(plain(title, "bold")), _buffer_rows(rows, width))
