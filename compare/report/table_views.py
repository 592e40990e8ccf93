"""The views of a run's records: tables, each made from columns of rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ..base.usage import UsageError
from ..graph import formats
from ..sources.row import Row
from ..sources.source import Source
from . import authorship as authorship_table
from . import matrix as matrix_table
from . import peers as peers_table
from . import ranks as ranks_table
from . import roofline as roofline_table
from . import table
from . import traffic as traffic_table
from .columns import COLUMNS, FINDING_COLUMNS, Column, as_data
from .outline import Outline, of_rows
from .strongest_findings import StrongFinding, every_finding, strongest

Render = Callable[..., str]


def times(source: Source, every: bool) -> Outline:
    """Status, time, comparison, rate and error of each record."""
    return _of_records("times", source, partial(table.render, every=every))


def matrix(source: Source, every: bool) -> Outline:
    """Cases down, implementations across: device times, or kernel counts where nothing was timed."""
    return _of_records("matrix", source, matrix_table.render)


def roofline(source: Source, every: bool) -> Outline:
    """Intensity, bound, roofline rate and recoverable time of each record."""
    return _of_records("roofline", source, roofline_table.render)


def traffic(source: Source, every: bool) -> Outline:
    """Compulsory, declared and measured bytes of each record."""
    rows = rows_of(source)
    if all(row.dram_bytes is row.dram_bytes_call is row.traffic_unavailable is None for row in rows):
        raise UsageError(
            f"{source.path}: no traffic was measured; on its GPU: xlafuse run --out {source.path} --resume --traffic"
        )
    return _of_records("traffic", source, traffic_table.render)


def kernel_roofline(source: Source, every: bool) -> Outline:
    """A line a kernel: bytes, FLOPs, bound, time and roofline time."""
    kernels = [kernel for result in source.shown for kernel in roofline_table.kernels(result)]
    if not kernels:
        raise UsageError(f"{source.path}: no graph with kernels")
    return _of_lines("kernel-roofline", kernels, roofline_table.KERNEL_COLUMNS, roofline_table.render_kernels)


def authorship(source: Source, every: bool) -> Outline:
    """Lines of kernel code of each implementation, and the speed that they bring."""
    lines = authorship_table.of(rows_of(source))
    return _of_lines("authorship", lines, authorship_table.COLUMNS, authorship_table.render)


def peers(source: Source, every: bool) -> Outline:
    """The project's own kernels against the best peer of each case, summed up."""
    return _of_lines("peers", peers_table.of(rows_of(source)), peers_table.COLUMNS, peers_table.render)


def ranks(source: Source, every: bool) -> Outline:
    """Cases over several GPUs: times, overlap and bytes of each GPU."""
    rows_of(source)
    return _of_lines("ranks", ranks_table.of(source.results), ranks_table.COLUMNS, ranks_table.render)


def findings(source: Source, every: bool) -> Outline:
    """Sentences about what costs most, from the graphs and times."""
    source = source.largest()
    sentences = every_finding(source) if every else strongest(source)
    return _of_lines("findings", sentences, FINDING_COLUMNS, _render_findings)


def rows_of(source: Source) -> list[Row]:
    """Return the rows of a run's records. Raises UsageError for another path."""
    if source.run is None:
        raise UsageError(
            f"{source.path}: no run, so it has no records to list; the views kernels, why, findings and "
            "kernel-roofline show its graphs"
        )
    return [result.row for result in source.results]


def _of_records(view: str, source: Source, render: Render) -> Outline:
    return _of_lines(view, rows_of(source), COLUMNS, render)


def _of_lines(view: str, lines: Sequence[Any], columns: Sequence[Column], render: Render) -> Outline:
    return of_rows(view, lambda: as_data(lines, columns), lambda markdown: render(lines, markdown=markdown))


def _render_findings(sentences: Sequence[StrongFinding], *, markdown: bool = False) -> str:
    shown = table.escaped if markdown else str
    lines = [
        f"{number}. {shown(finding.headline)} ({shown(finding.case)}{_worth(finding)})"
        for number, finding in enumerate(sentences, 1)
    ]
    return "\n".join(lines) or "nothing in the graphs of these records can be priced"


def _worth(finding: StrongFinding) -> str:
    return "" if finding.at_stake_us is None else f": worth up to {formats.span(finding.at_stake_us)}"
