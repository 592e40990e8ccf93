"""`xlafuse report`: write what a path holds to a file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from xlafuse.hlo.gc_pause import collector_paused

from ..base.usage import UsageError, write_file
from ..graph import formats
from ..report.views import WITHOUT_GRAPHS, outline, rows_of
from .selection import Selection, ViewChoice, selection_options, view_options
from .terminal import warn

if TYPE_CHECKING:
    from ..sources.source import Source

PAGE = ".html"
TEXTS = (".md", ".csv", ".json")
PICTURES = (".svg", ".png")


@click.command("report")
@click.argument("paths", nargs=-1, type=click.Path(path_type=Path), metavar="PATH [PATH]", required=True)
@click.option(
    "-o", "--out", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
    help="The file to write; its ending is its form: .html, .md, .csv, .json, .svg or .png. Default: a page beside the "
    "path.",
)
@click.option("--no-files", is_flag=True, help="For a page: leave out the folder of PTX and SASS files.")
@view_options
@selection_options
def command(
    paths: tuple[Path, ...], out: Path | None, no_files: bool, selection: Selection, choice: ViewChoice
) -> None:
    """Write a page for a browser, or one view as a file.

    PATH is anything that `xlafuse inspect` opens, and the views are the same. A page (.html) holds them all: which
    results are right, how fast each implementation is, fusion graphs, findings, bytes and sources. Pictures (.svg,
    .png) draw times, or with --view roofline the roofline. Two paths stand side by side.

    \b
      xlafuse report runs/mine
      xlafuse report runs/mine --view times --block softmax -o softmax.md
      xlafuse report runs/mine --case llama-8b --direction fwd -o times.svg
      xlafuse report runs/mine --view times -o mine.csv
      xlafuse report /tmp/xla_dump -o dump.html
      xlafuse report runs/tpu runs/gpu -i xla -o both.html
    """
    out = out or paths[0].resolve().with_name(f"{paths[0].resolve().name}.html")
    check_ending(out, page_only={"--no-files": no_files})
    with collector_paused():
        click.echo(write(selection.open(paths), out, choice, files=not no_files, selected=selection.selected))


def check_ending(out: Path, page_only: Mapping[str, Any]) -> None:
    """Refuse a file whose ending is no form, and options that only a page has. Raises UsageError."""
    ending = out.suffix.lower()
    if ending not in (PAGE, *TEXTS, *PICTURES):
        raise UsageError(f"{out}: the ending is the form; expected {PAGE}, {', '.join((*TEXTS, *PICTURES))}")
    if ending != PAGE and (given := [option for option, value in page_only.items() if value]):
        raise UsageError(f"{given[0]} goes with a page, a file that ends in {PAGE}")


def write(source: Source, out: Path, choice: ViewChoice, *, files: bool, selected: bool = False) -> str:
    """Write the file; return the line to print. files: with a page, write PTX and SASS files next to it.

    Raises UsageError and RunFolderError.
    """
    ending = out.suffix.lower()
    if ending == PAGE:
        return _page(source, out, choice, files)
    if ending in PICTURES:
        return _picture(source, out, choice)
    default = "times" if source.run is not None and choice.kernel is None else None
    view = choice.view_of(source, default=default, as_json=ending == ".json")
    shown = outline(view, source, choice.shown(selected=selected))
    text = {".md": shown.markdown, ".csv": shown.csv, ".json": lambda: f"{shown.json()}\n"}[ending]()
    if text is None:
        raise UsageError(f"{out}: --view {view} is no flat table; write it as .md or .json, or a page without --view")
    write_file(out, text.encode(errors="replace"))
    warn(source.warnings)
    if view not in WITHOUT_GRAPHS or ending != ".md":
        warn(source.unreadable)
    return f"{out}: view {view} of {source.name}"


def _page(source: Source, out: Path, choice: ViewChoice, files: bool) -> str:
    from ..report.page import page

    if choice.view is not None or choice.kernel is not None or choice.price_as is not None:
        raise UsageError("a page holds all views; leave --view, --why, --kernel and --price-as out, or write .md")
    if source.profile is not None and not source.results:
        raise UsageError(
            f"{source.path}: no kernel of this profile is joined to a graph; `xlafuse inspect {source.path}` lists its "
            "kernels, and a folder of `xlafuse capture` has their graphs, too"
        )
    source = source.largest()
    if not source.results:
        raise UsageError(f"{source.path}: no record to show; `xlafuse run --out {source.path}` makes some")
    page.write(source, out, files=files)
    warn(source.warnings)
    size = f", {out.stat().st_size / 1e6:.1f} MB" if out.is_file() else ""
    what = f"{formats.count(len(source.shown), 'record')} of {formats.count(len(source.cases), 'case')}"
    if source.run is None:
        what = formats.count(len(source.shown), "fusion graph")
    return f"{out}: {what}{size}; open it in a browser"


def _picture(source: Source, out: Path, choice: ViewChoice) -> str:
    from ..report import picture

    if choice.view_of(source, default="times") not in ("times", "roofline"):
        raise UsageError(f"{out}: a picture draws times, or with --view roofline the roofline")
    rows = rows_of(source)
    colours = picture.colours(rows)
    if choice.view == "roofline":
        spec = picture.roofline(rows, source.ceilings, colours)
    else:
        spec = picture.times(rows, colours)
    picture.write(out, spec)
    warn(source.warnings)
    return f"{out}: drawn"
