"""Two runs held against each other, in a terminal: environment first, then what changed, then the kernels."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from ...base.text import number, printable
from ...graph import formats
from ...graph.render import diff_view
from ...graph.render.text_view import columns, plain, titled
from .runs import REGRESSIONS, RecordChange, RunDiff

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.tree import Tree

MOST = 12  # records of a kind, or trees of kernels, unless all are asked for

# Sections of records whose times changed: the words of compare.report.diff.times, and the title.
TIMED = (
    (("slower",), "slower"),
    (("faster",), "faster"),
    (("slower between kernels", "faster between kernels"), "other gaps between kernels, whose own times are the same"),
)


def views(diff: RunDiff, *, every: bool = False) -> Iterable[RenderableType]:
    """In the order in which they are to be read."""
    yield _environment(diff)
    for words, title in TIMED:
        yield from _section(title, [_timed(change) for change in diff.timed(*words)], every)
    for title, lines in listed(diff):
        yield from _section(title, lines, every)
    yield from _fused(diff, every)
    yield plain("\n".join(summary(diff)))


def listed(diff: RunDiff) -> list[tuple[str, list[list[str]]]]:
    """By title what is listed beside times and kernels: of each record its id with what is to be said, and details."""
    return [
        ("other status", _statuses(diff)),
        ("more kernels, or more bytes", [_grown(each) for each in diff.changes if set(each.regressions) & _GROWN]),
        ("times not held against each other", _refused(diff)),
        ("configurations that rest on something else", _configurations(diff)),
        (f"only in {diff.before}", _only(diff, after=False)),
        (f"only in {diff.after}", _only(diff, after=True)),
        ("not compared", [[f"{each.id}: {note}" for note in each.notes] for each in diff.changes if each.notes]),
    ]


def summary(diff: RunDiff) -> list[str]:
    """What it comes to, a line each: how many records, of what; whether the gate holds."""
    shared = [change for change in diff.changes if change.before and change.after]
    judged = [change for change in shared if change.times and change.times.word]
    counts = {
        "slower": len(diff.timed("slower")), "faster": len(diff.timed("faster")), "tied": len(diff.timed("tie")),
        "unresolved": len(diff.timed("unresolved")),
        "with other gaps alone": len(diff.timed("slower between kernels", "faster between kernels")),
    }
    refused = sum(bool(change.times and change.times.refused) for change in shared)
    told = ", ".join(f"{many} {word}" for word, many in counts.items() if many)
    same = sum(change.graph is not None and change.graph.empty for change in shared)
    lines = [
        f"{formats.count(len(shared), 'record')} in both; {formats.count(len(judged), 'time')} held against each other"
        + (f": {told}" if told else "") + f" (tolerance {percent(diff.tolerance)})"
        + (f"; {refused} could not be" if refused else ""),
        f"{len(diff.fused)} differently fused, {same} the same",
    ]
    if diff.regressed:
        kinds = {kind: sum(kind in change.regressions for change in diff.regressed) for kind in diff.fail_on}
        told = ", ".join(f"{many} {kind} ({REGRESSIONS[kind]})" for kind, many in kinds.items() if many)
        lines.append(f"regressions: {told}")
    else:
        lines.append(f"no regression by {', '.join(diff.fail_on)}")
    return lines


def percent(share: float) -> str:
    return f"{100 * share:g}%"


def fusion(change: RecordChange) -> RenderableType:
    """How the two graphs of a record differ."""
    before, after = change.before, change.after
    assert before and after and before.graph and after.graph and change.graph
    return diff_view.tree(change.id, change.graph, before.graph, after.graph)


def _environment(diff: RunDiff) -> RenderableType:
    if not diff.environment:
        return titled(f"{diff.before} → {diff.after}", ["made with the same packages, on the same kind of machine"])
    tree = titled(f"{diff.before} → {diff.after}", ["made with"])
    for each in diff.environment:
        grid = columns(30, None, gap=1)
        grid.add_row(plain(printable(each.name, 60)), plain(f"{printable(each.before)} → {printable(each.after)}"))
        tree.add(grid)
    return tree


def _section(title: str, lines: Sequence[Sequence[str]], every: bool) -> Iterable[Tree]:
    """A tree with a branch for each record: its id and what is to be said; nothing where there is none."""
    if not lines:
        return
    tree = titled(f"{title}: {formats.count(len(lines), 'record')}", [])
    for head, *more in lines if every else lines[:MOST]:
        branch = tree.add(plain(printable(head)))
        for line in more:
            branch.add(plain(printable(line)))
    if not every and len(lines) > MOST:
        tree.add(plain(f"… and {len(lines) - MOST} more; --all shows them"))
    yield tree


def _statuses(diff: RunDiff) -> list[list[str]]:
    found = []
    for change in diff.changes:
        if change.status_changed:
            before, after = change.pair("status")
            detail = change.pair("detail")[1]
            found.append([f"{change.id}: {before} → {after}", *([str(detail)] if detail else [])])
    return found


def _timed(change: RecordChange) -> list[str]:
    times = change.times
    assert times is not None and times.main is not None
    effect = "the call unresolved" if times.main.word == "unresolved" else times.main.effect
    spoken = f"{effect}, {interval(times.main.low, times.main.high)}"
    busy = times.busy
    lines = [f"{change.id}: {number(times.before_us)} → {number(times.after_us)} µs, {spoken}"]
    if busy is not None and (busy.word != times.main.word or times.word != times.main.word):
        lines.append(f"its kernels alone: {busy.word}, {interval(busy.low, busy.high)}")
    return [*lines, *times.notes]


def interval(low: float, high: float) -> str:
    """Of the ratio of the time after to the time before."""
    return f"ratio {low:.3f} to {high:.3f}"


_GROWN = {"kernels", "bytes"}


def _grown(change: RecordChange) -> list[str]:
    kernels, moved = change.pair("kernels"), change.pair("bytes_moved")
    sizes = " → ".join(map(formats.size, moved))
    return [f"{change.id}: {kernels[0]} → {kernels[1]} kernels, which move {sizes}"]


def _refused(diff: RunDiff) -> list[list[str]]:
    found = [(change.id, change.times.refused) for change in diff.changes if change.times and change.times.refused]
    return [[f"{id}: {reason}"] for id, reason in found]


def _configurations(diff: RunDiff) -> list[list[str]]:
    return [["{}: {} → {}".format(change.id, *change.pair("provenance"))] for change in diff.reconfigured]


def _only(diff: RunDiff, *, after: bool) -> list[list[str]]:
    """Ids of what one run has alone."""
    return [[change.id] for change in diff.changes if (change.before if after else change.after) is None]


def _fused(diff: RunDiff, every: bool) -> Iterable[RenderableType]:
    found = diff.fused
    yield from map(fusion, found if every else found[:MOST])
    if not every and len(found) > MOST:
        yield plain(f"… and {len(found) - MOST} more differently fused; --all shows them")
