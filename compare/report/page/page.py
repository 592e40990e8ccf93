"""A run's folder as one HTML file: filled templates, with data and libraries embedded (embed.py).

The file contains the front page as plain HTML. A case's page is an HTML fragment with the specifications of its charts;
it is embedded as data and shown when its address (#/case/...) is opened.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from ...base import atomic_write, host
from ...base.text import number, printable
from ...graph import formats
from ...record.run_folder import RunFolderError
from .. import run_results
from ..aligned import SideBySide
from ..columns import mega, percent
from ..overall import overall
from ..palette import colours
from ..run_results import CaseResults, Run
from ..strongest_findings import strongest
from . import embed, views
from .content import about, case, charts, kernels, libraries, overview, ranks, records

if TYPE_CHECKING:
    from jinja2 import Environment

_FOLDER = Path(__file__).parent
_STYLES = ("page.css",)
_SCRIPTS = ("page.js", "matrix.js", "charts.js", "records.js")


def write(folder: Path, out: Path, wanted: Mapping[str, Iterable[str]], *, files: bool = True) -> Run:
    """Write the report of a run, or of its wanted records (rows.only). Return what it shows.

    files: write texts that are too large for the page to the folder "<stem of out>-files". Without it, or if `out` is
    no regular file, they are left out. Raises RunFolderError and UsageError, also if a file cannot be written.
    """
    packages = libraries.read()
    run = run_results.read(folder, wanted)
    _save(run, packages, out, files=files)
    return run


def write_side_by_side(name: str, found: Mapping[str, SideBySide], out: Path) -> None:
    """Write a page of graphs side by side, by the title of each case. Raises as `write`."""
    packages = libraries.read()
    _save(run_results.side_by_side(name, found), packages, out, files=False)


def _save(run: Run, packages: libraries.Libraries, out: Path, *, files: bool) -> None:
    regular = out.is_file() or not out.exists()
    text = document(run, packages, out.with_name(f"{out.stem}-files") if files and regular else None)
    try:
        atomic_write.write(out, text.encode(errors="replace"))
    except OSError as problem:
        raise RunFolderError(f"{out}: cannot be written: {problem.strerror}") from problem


def document(run: Run, packages: libraries.Libraries, files: Path | None) -> str:
    """Return the report as HTML. files: the folder for texts that are too large for it."""
    palette = colours(result.name for result in run.results)
    title = printable(f"{run.name}: fusion report", 200)
    elements = [
        embed.element("settings", {
            "colours": palette, "cases": [c.id for c in run.cases],
            "links": [overview.href(each.id) for each in run.cases],
            "home": overview.href(run.cases[0].id) if run.run is None and len(run.cases) == 1 else "#/",
        }),
        embed.text("lib-vega", packages.vega),
    ]
    if run.run is not None:
        elements += [
            embed.element("rows", records.data(run)), embed.text("lib-tables", packages.tables),
            embed.text("lib-tables-style", packages.tables_style),
        ]
    elements += embed.elements("case", [_case(each, palette) for each in run.cases])
    elements += views.elements(run, files)
    return render(
        "page.html", title=title, front=_front(run, title), recorded=run.run is not None,
        elements=elements, kinds=charts.KINDS, styles=_static([*_STYLES, *views.styles()]),
        scripts=_static([*_SCRIPTS, *views.scripts()]),
        version=host.xlafuse_version(), cases_per_element=embed.CASES_PER_ELEMENT,
    )


def _case(shown: CaseResults, palette: Mapping[str, str]) -> dict[str, Any]:
    bars = kernels.bars(shown)
    calls = ranks.calls(shown)
    html = render("case.html", **case.values(shown), drawn_kernels=bool(bars), rank_calls=calls)
    specs = case.chart_specs(shown, palette, bars)
    if calls.bars:
        specs["ranks"] = charts.ranks(calls.bars)
    return {"html": html, "charts": specs, "bars": bars}


def _front(run: Run, title: str) -> Markup:
    values = {
        "title": title, "recorded": run.run is not None, "overall": overall(run), "findings": strongest(run),
        "matrix": overview.matrix(run), "graphs": [] if run.run is not None else overview.graphs(run),
        "timed": run.timed, "recorded_on": run.recorded_on,
        "some_roofline": any(result.row["roofline_time_us"] is not None for result in run.results),
        "bounds": overview.BOUNDS, "warnings": [printable(w, 400) for w in run.warnings], **about.values(run),
        "total": len(run.results), "cases": len(run.cases),
    }
    return Markup(render("front.html", **values))


def render(name: str, **values: Any) -> str:
    """Return a filled template; all values are escaped."""
    return _environment().get_template(name).render(**values)


def _static(names: list[str]) -> list[Markup]:
    """Return our own style sheets or scripts. None contains its element's end tag (tests/compare/report/page)."""
    return [Markup((_FOLDER / "static" / name).read_text()) for name in names]


@cache
def _environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(_FOLDER / "templates"), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        number=number, mega=mega, percent=percent, us=formats.number_of_us, span=formats.span, href=overview.href,
        size=formats.size, digits=lambda value: "" if value is None else f"{value:.3g}",
    )
    return environment
