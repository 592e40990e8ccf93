"""A comparison of two runs in a terminal and as a page: environment, changes of each record, then of the kernels."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib import resources
from statistics import geometric_mean
from typing import TYPE_CHECKING

from ...base.text import number, printable
from ...graph import formats
from ...graph.render import diff_view
from ...graph.render.text_view import columns, plain, render, titled
from ...plan.speedup import Speedup
from .runs import REGRESSIONS, RecordChange, RunDiff

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.tree import Tree

MOST = 12  # records of a section, or trees of kernels, without --all
LEAST_FOR_MEAN = 5  # records of an implementation, or of all, for a mean ratio
PAGE_WIDTH = 120  # characters of a tree on the page

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
    yield from map(fusion, diff.fused if every else diff.fused[:MOST])
    if not every and len(diff.fused) > MOST:
        yield plain(f"… and {len(diff.fused) - MOST} more fused differently; --all shows them")
    yield plain("\n".join(summary(diff)))


def html(diff: RunDiff) -> str:
    """Return an HTML document without scripts, links or requests; all text is escaped."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined)
    environment.filters |= {"clean": lambda text: printable(str(text), 600), "number": number, "interval": interval}
    template = resources.files(__package__).joinpath("page.html.jinja").read_text(encoding="utf-8")
    return environment.from_string(template).render(
        diff=diff, summary=summary(diff), timed=[(title, diff.timed(*words)) for words, title in TIMED],
        listed=listed(diff), fused=[(change.id, render(fusion(change), PAGE_WIDTH)) for change in diff.fused],
    )


def listed(diff: RunDiff) -> list[tuple[str, list[list[str]]]]:
    """Return the sections other than times and kernels: a title, and for each record a line and further details."""
    changes = diff.changes
    return [
        ("status changed", [_status(change) for change in changes if change.status_changed]),
        ("more kernels, or more bytes", [
            _kernels_and_bytes(change) for change in changes if {"kernels", "bytes"} & set(change.worse)
        ]),
        ("times not compared", [
            [f"{change.id}: {change.times.refused}"] for change in changes if change.times and change.times.refused
        ]),
        ("kernel configurations of other provenance", [
            ["{}: {} → {}".format(change.id, *change.pair("provenance"))] for change in diff.reconfigured
        ]),
        (f"only in {diff.before}", [[change.id] for change in changes if change.after is None]),
        (f"only in {diff.after}", [[change.id] for change in changes if change.before is None]),
        ("not compared", [[f"{change.id}: {note}" for note in change.notes] for change in changes if change.notes]),
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
        + (f": {told}" if told else "") + f" (tolerance {100 * diff.tolerance:g}%)"
        + (f"; {formats.count(refused, 'time')} could not be compared" if refused else ""),
        *_mean_ratios(judged),
        f"{formats.count(len(diff.fused), 'record')} fused differently, {same} fused the same",
    ]
    # A difference between two cards is no regression.
    said = "no change between them counts as a regression"
    lines += [f"another card: {printable(pair)}; {said}" for pair in diff.other_cards]
    if diff.regressed:
        kinds = {kind: sum(kind in change.regressions for change in diff.regressed) for kind in diff.fail_on}
        told = ", ".join(f"{many} {kind} ({REGRESSIONS[kind]})" for kind, many in kinds.items() if many)
        lines.append(f"regressions: {told}")
    elif diff.judged:
        lines.append(f"no regression; checked: {', '.join(diff.fail_on)}")
    return lines


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


def fusion(change: RecordChange) -> RenderableType:
    """Return the differences between the two graphs of a record."""
    assert change.graph is not None
    return diff_view.tree(change.id, change.graph, *change.graphs)


def _environment(diff: RunDiff) -> RenderableType:
    said = "environment" if diff.environment else "same packages, same kind of machine"
    tree = titled(f"{diff.before} → {diff.after}", [said])
    for difference in diff.environment:
        grid = columns(30, None, gap=1)
        values = f"{printable(difference.before)} → {printable(difference.after)}"
        grid.add_row(plain(printable(difference.name, 60)), plain(values))
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


def _status(change: RecordChange) -> list[str]:
    line, detail = "{}: {} → {}".format(change.id, *change.pair("status")), change.pair("detail")[1]
    return [line, str(detail)] if detail else [line]


def _timed(diff: RunDiff, change: RecordChange) -> list[str]:
    times = change.times
    assert times is not None and times.main is not None
    main, busy = times.main, times.busy
    effect = "call time unresolved" if main.word == "unresolved" else main.effect
    pair = f"{number(times.before_us)} → {number(times.after_us)} µs"
    lines = [f"{change.id}: {pair}, {effect}, ratio {interval(main)}"]
    if busy is not None and (busy.word != main.word or times.word != main.word):
        lines.append(f"kernel time: {busy.word}, ratio {interval(busy)}")
    return [*lines, *diff.notes_of(times)]


def interval(speedup: Speedup) -> str:
    """Return the 95% interval of the time after over the time before."""
    return f"{speedup.low:.3f} to {speedup.high:.3f}"


def _kernels_and_bytes(change: RecordChange) -> list[str]:
    kernels = change.pair("kernels")
    sizes = " → ".join(map(formats.size, change.pair("bytes_declared")))
    return [f"{change.id}: {kernels[0]} → {kernels[1]} kernels, declared bytes {sizes}"]
