"""The views of what a path holds, by name: those of fusion graphs, and tables of a run's records."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ..base.usage import UsageError, one_of
from ..model.step import step_of
from ..model.used_blocks import used_blocks
from ..sources.row import Row
from ..sources.source import Source
from . import authorship, graph_views, matrix, parts_view, peers, ranks, remedies_view, roofline, table, traffic
from .columns import COLUMNS, FINDING_COLUMNS, Column, as_data
from .graph_views import Shown
from .outline import Outline, of_rows
from .strongest_findings import StrongFinding, every_finding, strongest

Render = Callable[..., str]


def default(source: Source, selected: bool) -> str:
    """Return the view that a path is shown by, if the user names none. selected: the user chose a module."""
    if source.put_together is not None:
        return "stages"
    return "steps" if source.profile is not None and not selected else "kernels"


def outline(view: str, source: Source, shown: Shown) -> Outline:
    """Return what a view shows of a source.

    Raises UsageError for an unknown view, and with the reason where the view has nothing to show there.
    """
    return VIEWS[one_of("view", view, VIEWS)](source, shown)


def rows_of(source: Source) -> list[Row]:
    """Return the rows of a run's records. Raises UsageError for another path."""
    if source.run is None:
        raise UsageError(
            f"{source.path}: no run, so it has no records to list; the views kernels, why, findings and "
            "kernel-roofline show its graphs"
        )
    return [result.row for result in source.results]


def _records(view: str, render: Render, source: Source, shown: Shown) -> Outline:
    return _table(view, rows_of(source), COLUMNS, render)


def _table(view: str, lines: Sequence[Any], columns: Sequence[Column], render: Render) -> Outline:
    return of_rows(view, lambda: as_data(lines, columns), lambda markdown: render(lines, markdown=markdown))


def _times(source: Source, shown: Shown) -> Outline:
    """Status, time, comparison, rate and error of each record."""
    return _records("times", partial(table.render, every=shown.every), source, shown)


def _traffic(source: Source, shown: Shown) -> Outline:
    """Compulsory, declared and measured bytes of each record."""
    rows = rows_of(source)
    if all(row.dram_bytes is row.dram_bytes_call is row.traffic_unavailable is None for row in rows):
        raise UsageError(
            f"{source.path}: no traffic was measured; on its GPU: xlafuse run --out {source.path} --resume --traffic"
        )
    return _table("traffic", rows, COLUMNS, traffic.render)


def _kernel_roofline(source: Source, shown: Shown) -> Outline:
    """A line a kernel: bytes, FLOPs, bound, time and roofline time."""
    kernels = [kernel for result in source.shown for kernel in roofline.kernels(result, predict=True)]
    if not kernels:
        raise UsageError(f"{source.path}: no graph with kernels")
    return _table("kernel-roofline", kernels, roofline.KERNEL_COLUMNS, roofline.render_kernels)


def _authorship(source: Source, shown: Shown) -> Outline:
    """Lines of kernel code of each implementation, and the speed that they bring."""
    return _table("authorship", authorship.of(rows_of(source)), authorship.COLUMNS, authorship.render)


def _peers(source: Source, shown: Shown) -> Outline:
    """The project's own kernels against the best peer of each case, summed up."""
    return _table("peers", peers.of(rows_of(source)), peers.COLUMNS, peers.render)


def _ranks(source: Source, shown: Shown) -> Outline:
    """Cases over several GPUs: times, overlap and bytes of each GPU."""
    rows_of(source)
    return _table("ranks", ranks.of(source.results), ranks.COLUMNS, ranks.render)


def _parts(source: Source, shown: Shown) -> Outline:
    """A line a part of the user's model: its measured or predicted time by phase, kernels and rate."""
    _require_one_program(source)
    step = step_of(source)
    lines = parts_view.lines(step, used_blocks(step))
    return _table("parts", lines, parts_view.COLUMNS, parts_view.render)


def _remedies(source: Source, shown: Shown) -> Outline:
    """Changes to the blocks of a step, with the gain that measured rows promise."""
    _require_one_program(source)
    lines = remedies_view.timed_lines(source)
    return _table("remedies", lines, remedies_view.COLUMNS, remedies_view.render)


def _require_one_program(source: Source) -> None:
    graph_views.require_graphs(source)
    alternatives = source.put_together is not None or source.kind in ("run", "file")
    if alternatives and len(source.results) > 1:
        raise UsageError(f"{source.path}: parts are those of one program; --module names one of several")


def _findings(source: Source, shown: Shown) -> Outline:
    """Sentences about what costs most, from the graphs and times."""
    source = source.largest()
    sentences = every_finding(source) if shown.every else strongest(source)
    return _table("findings", sentences, FINDING_COLUMNS, _render_findings)


def _render_findings(sentences: Sequence[StrongFinding], *, markdown: bool = False) -> str:
    plain = table.escaped if markdown else str
    lines = []
    for number, finding in enumerate(sentences, 1):
        worth = f": {finding.worth}" if finding.worth else ""
        lines.append(f"{number}. {plain(finding.headline)} ({plain(finding.case)}{worth})")
    return "\n".join(lines) or "nothing in the graphs of these records can be priced"


GRAPH_VIEWS = {
    "kernels": graph_views.kernels, "why": graph_views.why, "stages": graph_views.stages,
    "passes": graph_views.passes, "steps": graph_views.steps,
}
TABLE_VIEWS: dict[str, Callable[[Source, Shown], Outline]] = {
    "parts": _parts, "remedies": _remedies, "times": _times,
    # Cases down, implementations across: device times, or kernel counts where nothing was timed.
    "matrix": partial(_records, "matrix", matrix.render),
    # Intensity, bound, roofline rate and recoverable time of each record.
    "roofline": partial(_records, "roofline", roofline.render),
    "kernel-roofline": _kernel_roofline, "traffic": _traffic, "findings": _findings, "ranks": _ranks, "peers": _peers,
    "authorship": _authorship,
}
VIEWS = {**GRAPH_VIEWS, **TABLE_VIEWS}
WITHOUT_GRAPHS = ("times", "matrix", "traffic", "ranks", "peers", "authorship")  # their text needs no graph
