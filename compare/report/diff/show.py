"""A comparison of two runs in a terminal: environment, changes of each record, then changes of the kernels."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import geometric_mean
from typing import TYPE_CHECKING

from ...base.text import number, printable
from ...graph import formats
from ...graph.render import diff_view
from ...graph.render.text_view import columns, plain, titled
from .runs import REGRESSIONS, RecordChange, RunDiff

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.tree import Tree

MOST = 12  # records of a section, or trees of kernels, without --all
LEAST_FOR_MEAN = 5  # records of an implementation, or of all, for a mean ratio

# Sections of records whose times changed: the words of times.py, and the title.
TIMED = (
    (("slower",), "slower"),
    (("faster",), "faster"),
    (("longer launch gaps", "shorter launch gaps"), "other launch gaps, unchanged kernel times"),
)


def views(diff: RunDiff, *, every: bool = False) -> Iterable[RenderableType]:
    """Yield the sections from top to bottom. every: do not shorten long lists."""
    yield _environment(diff)
    for words, title in TIMED:
        yield from _section(title, [_timed(diff, change) for change in diff.timed(*words)], every)
    for title, lines in listed(diff):
        yield from _section(title, lines, every)
    yield from _fused(diff, every)
    yield plain("\n".join(summary(diff)))


def listed(diff: RunDiff) -> list[tuple[str, list[list[str]]]]:
    """Return the sections other than times and kernels: a title, and for each record a line and further details."""
    return [
        ("status changed", _statuses(diff)),
        ("more kernels, or more bytes", [
            _kernels_and_bytes(each) for each in diff.changes if {"kernels", "bytes"} & set(each.worse)
        ]),
        ("times not compared", _refused(diff)),
        ("kernel configurations of other provenance", _configurations(diff)),
        (f"only in {diff.before}", _only(diff, after=False)),
        (f"only in {diff.after}", _only(diff, after=True)),
        ("not compared", [[f"{each.id}: {note}" for note in each.notes] for each in diff.changes if each.notes]),
    ]


def summary(diff: RunDiff) -> list[str]:
    """Return the summary lines: how many records changed in which way, and the regressions."""
    shared = [change for change in diff.changes if change.before and change.after]
    judged = [change for change in shared if change.times and change.times.word]
    counts = {
        "slower": len(diff.timed("slower")), "faster": len(diff.timed("faster")), "tied": len(diff.timed("tie")),
        "unresolved": len(diff.timed("unresolved")),
        "with other launch gaps": len(diff.timed("longer launch gaps", "shorter launch gaps")),
    }
    refused = sum(bool(change.times and change.times.refused) for change in shared)
    told = ", ".join(f"{many} {word}" for word, many in counts.items() if many)
    same = sum(change.graph is not None and change.graph.empty for change in shared)
    lines = [
        f"{formats.count(len(shared), 'record')} in both runs; {formats.count(len(judged), 'time')} compared"
        + (f": {told}" if told else "") + f" (tolerance {percent(diff.tolerance)})"
        + (f"; {formats.count(refused, 'time')} could not be compared" if refused else ""),
        *_mean_ratios(judged),
        f"{formats.count(len(diff.fused), 'record')} fused differently, {same} fused the same",
    ]
    lines += other_cards(diff)
    if diff.regressed:
        kinds = {kind: sum(kind in change.regressions for change in diff.regressed) for kind in diff.fail_on}
        told = ", ".join(f"{many} {kind} ({REGRESSIONS[kind]})" for kind, many in kinds.items() if many)
        lines.append(f"regressions: {told}")
    elif diff.judged:
        lines.append(f"no regression; checked: {', '.join(diff.fail_on)}")
    return lines


def other_cards(diff: RunDiff) -> list[str]:
    """Return a line for each pair of different GPUs: what differs between them is no regression."""
    said = "no change between them counts as a regression"
    return [f"another card: {printable(pair)}; {said}" for pair in diff.other_cards]


def _mean_ratios(judged: Iterable[RecordChange]) -> list[str]:
    """Return a line with the geometric means of the times' ratios; nothing below LEAST_FOR_MEAN records."""
    ratios: dict[str, list[float]] = {}
    for change in judged:
        times, name = change.times, printable(change.id.rpartition("/")[2], 40)
        if times and times.before_us and times.after_us:
            ratios.setdefault(name, []).append(times.after_us / times.before_us)
    every = [ratio for found in ratios.values() for ratio in found]
    if len(every) < LEAST_FOR_MEAN:
        return []
    by_name = {name: geometric_mean(found) for name, found in ratios.items() if len(found) >= LEAST_FOR_MEAN}
    listed = ", ".join(f"{name} {by_name[name]:.2f}" for name in sorted(by_name, key=lambda name: by_name[name]))
    return [
        f"device time after over before, geometric mean of {len(every)} records: {geometric_mean(every):.2f}"
        + (f" ({listed})" if listed else "")
    ]


def percent(share: float) -> str:
    return f"{100 * share:g}%"


def fusion(change: RecordChange) -> RenderableType:
    """Return the differences between the two graphs of a record."""
    before, after = change.before, change.after
    assert before and after and before.graph and after.graph and change.graph
    return diff_view.tree(change.id, change.graph, before.graph, after.graph)


def _environment(diff: RunDiff) -> RenderableType:
    said = "environment" if diff.environment else "same packages, same kind of machine"
    tree = titled(f"{diff.before} → {diff.after}", [said])
    for each in diff.environment:
        grid = columns(30, None, gap=1)
        grid.add_row(plain(printable(each.name, 60)), plain(f"{printable(each.before)} → {printable(each.after)}"))
        tree.add(grid)
    for note in diff.shared_notes:
        tree.add(plain(f"all compared times: {printable(note)}"))
    return tree


def _section(title: str, lines: Sequence[Sequence[str]], every: bool) -> Iterable[Tree]:
    """Yield a tree with a branch for each record; nothing without records."""
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


def _timed(diff: RunDiff, change: RecordChange) -> list[str]:
    times = change.times
    assert times is not None and times.main is not None
    effect = "call time unresolved" if times.main.word == "unresolved" else times.main.effect
    busy = times.busy
    ratio = interval(times.main.low, times.main.high)
    lines = [f"{change.id}: {number(times.before_us)} → {number(times.after_us)} µs, {effect}, {ratio}"]
    if busy is not None and (busy.word != times.main.word or times.word != times.main.word):
        lines.append(f"kernel time: {busy.word}, {interval(busy.low, busy.high)}")
    return [*lines, *diff.notes_of(times)]


def interval(low: float, high: float) -> str:
    """Return the 95% interval of the time after over the time before, in words."""
    return f"ratio {low:.3f} to {high:.3f}"


def _kernels_and_bytes(change: RecordChange) -> list[str]:
    kernels, declared = change.pair("kernels"), change.pair("bytes_declared")
    sizes = " → ".join(map(formats.size, declared))
    return [f"{change.id}: {kernels[0]} → {kernels[1]} kernels, declared bytes {sizes}"]


def _refused(diff: RunDiff) -> list[list[str]]:
    found = [(change.id, change.times.refused) for change in diff.changes if change.times and change.times.refused]
    return [[f"{id}: {reason}"] for id, reason in found]


def _configurations(diff: RunDiff) -> list[list[str]]:
    return [["{}: {} → {}".format(change.id, *change.pair("provenance"))] for change in diff.reconfigured]


def _only(diff: RunDiff, *, after: bool) -> list[list[str]]:
    """Return the ids that only one run has."""
    return [[change.id] for change in diff.changes if (change.before if after else change.after) is None]


def _fused(diff: RunDiff, every: bool) -> Iterable[RenderableType]:
    found = diff.fused
    yield from map(fusion, found if every else found[:MOST])
    if not every and len(found) > MOST:
        yield plain(f"… and {len(found) - MOST} more fused differently; --all shows them")
