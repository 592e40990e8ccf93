"""`xlafuse report`: show a run's results as tables, data, pictures or a page."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from xlafuse.hlo.gc_pause import collector_paused

from ..base.usage import UsageError
from ..graph import formats
from ..record.run_folder import read_records, read_run
from ..report import data, rows, table
from ..report.columns import FINDING_COLUMNS, Row, row_of
from ..sources import graph_sources
from .options import json_option, record_filters
from .terminal import warn

if TYPE_CHECKING:
    from ..report.strongest_findings import StrongFinding

Filters = Mapping[str, list[str]]  # fields of rows -> names
VIEWS = ("findings", "matrix", "roofline", "traffic", "authorship", "peers", "ranks")


@click.command("report")
@click.argument("path", type=click.Path(path_type=Path), metavar="PATH")
@json_option
@click.option("--csv", "as_csv", is_flag=True, help="Print CSV for spreadsheets and notebooks, with --json's columns.")
@click.option("--markdown", is_flag=True, help="Print Markdown, to paste into a pull request or a page.")
@click.option("--findings", is_flag=True, help="Sentences about what costs most, from the graphs and times.")
@click.option("--matrix", is_flag=True, help="Cases down, implementations across: device times, or kernel counts.")
@click.option("--roofline", is_flag=True, help="Intensity, bound, roofline rate and recoverable time.")
@click.option("--kernels", is_flag=True, help="With --roofline: one line a kernel.")
@click.option("--traffic", is_flag=True, help="Compulsory, declared and measured bytes.")
@click.option("--authorship", is_flag=True, help="Lines of kernel code and the speed that they bring.")
@click.option("--peers", is_flag=True, help="The project's own kernels against the best peer of each case, summed up.")
@click.option("--ranks", is_flag=True, help="Cases over several GPUs: times, overlap and bytes of each GPU.")
@click.option("--all", "every", is_flag=True, help="All columns of the tables; with --findings all of them, not five.")
@click.option(
    "--html", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
    help="Write everything to FILE as one page for a browser.",
)
@click.option("--no-files", is_flag=True, help="With --html: leave out the folder of PTX and SASS files.")
@click.option(
    "--picture", type=click.Path(path_type=Path), metavar="FILE",
    help="Draw times, or with --roofline the roofline, into an .svg or .png.",
)
@record_filters()
def command(
    path: Path, as_json: bool, as_csv: bool, markdown: bool, kernels: bool, every: bool, html: Path | None,
    no_files: bool, picture: Path | None, filters: Filters, **views: bool,
) -> None:
    """Show a run's results as a table or as a page.

    PATH is the folder that `xlafuse run` made. The report shows which results are right, how fast each implementation
    is, and how near it comes to the GPU's roofline.

    With --html, PATH may be anything that `xlafuse inspect` opens: HLO, a folder of dumps, Inductor's output, a
    graph's JSON. The page then shows its fusion graphs, findings, bytes and sources; for a profile or a folder of
    `xlafuse capture` also the kernels' times in a median step.

    \b
      xlafuse report runs/mine --block softmax --markdown
      xlafuse report runs/mine --case llama-8b --direction fwd --picture times.svg
      xlafuse report runs/mine --csv > mine.csv
      xlafuse report runs/mine --html mine.html
      xlafuse report /tmp/xla_dump --html dump.html
      xlafuse report runs/step --html step.html
    """
    forms = [name for name, asked in (("json", as_json), ("csv", as_csv), ("markdown", markdown)) if asked]
    click.echo(
        report(
            path, view=_only("views", [name for name in VIEWS if views[name]]) or "table",
            form=_only("forms", forms) or "text", kernels=kernels, every=every, html=html, files=not no_files,
            picture=picture, filters=filters,
        )
    )


def _only(what: str, chosen: list[str]) -> str:
    if len(chosen) > 1:
        raise UsageError(f"{' and '.join(f'--{name}' for name in chosen)} are different {what}; choose one")
    return "".join(chosen)


@collector_paused()
def report(
    path: Path, *, view: str, form: str, kernels: bool, every: bool, html: Path | None, files: bool,
    picture: Path | None, filters: Filters,
) -> str:
    """Return the text to print. path: a run's folder; with html, any path with graphs.

    view: "table" or one of VIEWS. form: "text", "markdown", "json" or "csv". every: all columns, or all findings.
    html, picture: a file to write instead. files: with html, write PTX and SASS files next to the page.

    Raises UsageError and RunFolderError.
    """
    is_data = form in ("json", "csv")
    if is_data and view == "matrix":
        raise UsageError(f"--matrix shows few numbers; --{form} without it has all of them")
    if not files and html is None:
        raise UsageError("--no-files needs --html")
    if html is not None:
        if view != "table" or kernels or every or picture or form != "text":
            raise UsageError("--html holds all views; leave the other views and forms out")
        return _page(path, html, files, filters)
    if kernels and view != "roofline":
        raise UsageError("--kernels needs --roofline")
    if picture is not None and (kernels or view not in ("table", "roofline") or form != "text"):
        raise UsageError("--picture draws times, or with --roofline the roofline; leave other views and forms out")
    if every and (picture or not (view == "findings" or (view == "table" and not is_data))):
        raise UsageError("--all goes with the tables of times and with --findings; other views and forms are whole")
    if path.exists() and not graph_sources.is_run(path):
        raise UsageError(
            f"{path}: no run, so it has no records to list; `xlafuse inspect {path}` shows its kernels, and "
            f"`xlafuse report {path} --html FILE` writes a page about them"
        )
    if view == "findings":
        return _findings(path, form, filters, every)
    run = read_run(path)
    records, unread = read_records(path)
    read = rows.of_records(path, run, records)
    warn([*unread, *read.warnings])
    selected = rows.only(read.rows, **filters)
    if view == "roofline" or (view == "table" and is_data):
        selected, unread = rows.with_rooflines(selected, graph_sources.contents_of_records(path, run, records))
        warn(unread)
    if picture is not None:
        return _draw(picture, view, read, selected)
    shown, render = _view(view, kernels, every, path, selected)
    if is_data:
        return _as_data(shown, form)
    return render(shown, markdown=form == "markdown")


def _as_data(shown: list[Row], form: str) -> str:
    return data.as_json(shown) if form == "json" else data.as_csv(shown).removesuffix("\n")


def _findings(run: Path, form: str, filters: Filters, every: bool) -> str:
    """Return the sentences that the HTML page's front begins with, or all."""
    from ..report import run_results
    from ..report.strongest_findings import every_finding, strongest

    read = run_results.read(run, filters)
    warn(read.warnings)
    if unread := [result.unreadable for result in read.results if result.unreadable]:
        warn([f"{len(unread)} of {formats.count(len(read.results), 'graph')} cannot be read: {unread[0]}"])
    found = every_finding(read) if every else strongest(read)
    if form in ("json", "csv"):
        return _as_data([row_of(each, FINDING_COLUMNS) for each in found], form)
    shown = table.escaped if form == "markdown" else str
    lines = [
        f"{number}. {shown(each.headline)} ({shown(each.case)}{_worth(each)})" for number, each in enumerate(found, 1)
    ]
    return "\n".join(lines) or "nothing in the graphs of these records can be priced"


def _worth(finding: StrongFinding) -> str:
    return "" if finding.at_stake_us is None else f": worth up to {formats.span(finding.at_stake_us)}"


def _draw(file: Path, view: str, read: rows.Rows, selected: list[Row]) -> str:
    from ..report import picture

    colours = picture.colours(read.rows)
    if view == "roofline":
        spec = picture.roofline(selected, read.ceilings, colours)
    else:
        spec = picture.times(selected, colours)
    picture.write(file, spec)
    return f"{file}: drawn"


def _page(path: Path, out: Path, files: bool, filters: Filters) -> str:
    from ..report.page import page

    shown = page.write(path, out, filters, files=files)
    warn(shown.warnings)
    size = f", {out.stat().st_size / 1e6:.1f} MB" if out.is_file() else ""
    cases = formats.count(len(shown.cases), "case")
    what = f"{formats.count(len(shown.results), 'record')} of {cases}"
    if shown.run is None:
        what = formats.count(len(shown.results), "fusion graph")
    return f"{out}: {what}{size}; open it in a browser"


def _view(
    view: str, kernels: bool, every: bool, run: Path, selected: list[Row]
) -> tuple[list[Row], Callable[..., str]]:
    """Return the rows to show and the function that renders them. Each view imports only its own modules."""
    if view == "matrix":
        from ..report import matrix

        return selected, matrix.render
    if view == "traffic":
        from ..report import traffic

        _require_traffic(run, selected)
        return selected, traffic.render
    if view == "authorship":
        from ..report import authorship

        return authorship.of(selected), authorship.render
    if view == "peers":
        from ..report import peers

        return peers.of(selected), peers.render
    if view == "ranks":
        from ..report import ranks

        found = ranks.of(read_records(run)[0])
        wanted = {rows.id_of(row) for row in selected}
        return [row for row in found if rows.id_of(row) in wanted], ranks.render
    if view == "roofline":
        from ..report import roofline

        if not kernels:
            return selected, roofline.render
        return list(roofline.kernels(graph_sources.contents(run).graphs, selected)), roofline.render_kernels
    return selected, partial(table.render, every=every)


def _require_traffic(run: Path, selected: list[Row]) -> None:
    if all(row["dram_bytes"] is row["dram_bytes_call"] is row["traffic_unavailable"] is None for row in selected):
        raise UsageError(f"{run}: no traffic was measured; on its GPU: xlafuse run --out {run} --resume --traffic")
