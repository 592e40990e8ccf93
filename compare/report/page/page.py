"""A run's folder as one HTML file: filled templates, with data and libraries embedded (embed.py).

The file contains the front page as plain HTML. A case's page is an HTML fragment with the specifications of its charts;
it is embedded as data and shown when its address (#/case/...) is opened.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from ...base import atomic_write, host
from ...base.text import number, printable
from ...graph import formats
from ...record.run_folder import RunFolderError
from ...sources.case_results import CaseResults
from ...sources.source import Source
from .. import charts
from ..columns import mega
from ..first_screen import first_screen, milliseconds
from ..overall import overall
from ..strongest_findings import strongest
from . import embed
from .content import about, case, kernels, libraries, overview, records
from .drawing import drawing
from .listings import sources

if TYPE_CHECKING:
    from jinja2 import Environment

_FOLDER = Path(__file__).parent
STYLES = ("page.css", "drawing.css", "sources.css")
# In the order in which they are loaded.
SCRIPTS = (
    "page.js", "make.js", "matrix.js", "charts.js", "records.js", "drawing-layout.js", "drawing-boxes.js", "drawing.js",
    "kernels.js", "sources.js",
)


def write(source: Source, out: Path, *, files: bool = True) -> None:
    """Write a page about the results of a path.

    files: write texts that are too large for the page to the folder "<stem of out>-files". Without it, or if `out` is
    no regular file, they are left out. Raises RunFolderError and UsageError, also if a file cannot be written.
    """
    packages = libraries.read()
    regular = out.is_file() or not out.exists()
    text = document(source, packages, out.with_name(f"{out.stem}-files") if files and regular else None)
    try:
        atomic_write.write(out, text.encode(errors="replace"))
    except OSError as problem:
        raise RunFolderError(f"{out}: cannot be written: {problem.strerror}") from problem


def document(source: Source, packages: libraries.Libraries, files: Path | None) -> str:
    """Return the report as HTML. files: the folder for texts that are too large for it."""
    palette = charts.colours(result.name for result in source.shown)
    title = printable(f"{source.name}: fusion report", 200)
    links = [overview.href(case_results.id) for case_results in source.cases]
    elements = [
        embed.element("settings", {
            "colours": palette, "cases": [c.id for c in source.cases],
            "links": links,
            "home": links[0] if source.run is None and source.profile is None and len(links) == 1 else "#/",
        }),
        embed.text("lib-vega", packages.vega),
    ]
    if source.run is not None:
        elements += [
            embed.element("rows", records.data(source)), embed.text("lib-tables", packages.tables),
            embed.text("lib-tables-style", packages.tables_style),
        ]
    elements += embed.elements("case", [_case(case_results, palette) for case_results in source.cases])
    elements += _views(source, files)
    return render(
        "page.html", title=title, front=_front(source, title), recorded=source.run is not None,
        elements=elements, kinds=charts.KINDS, styles=_static(STYLES), scripts=_static(SCRIPTS),
        version=host.xlafuse_version(), cases_per_element=embed.CASES_PER_ELEMENT,
    )


def _case(shown: CaseResults, palette: Mapping[str, str]) -> dict[str, Any]:
    bars = kernels.bars(shown)
    calls = kernels.calls_of_ranks(shown)
    html = render("case.html", **case.values(shown), drawn_kernels=bool(bars), rank_calls=calls)
    specs = case.chart_specs(shown, palette, bars)
    if calls.bars:
        specs["ranks"] = charts.ranks(calls.bars)
    return {"html": html, "charts": specs, "bars": bars}


def _views(source: Source, files: Path | None) -> list[Markup]:
    """Return the drawing and the sources of each case, and in "programs" the texts that cases share."""
    drawings = [drawing.of_case(r for r in case.results if r.read is not None) for case in source.cases]
    kept = sources.of_cases({case.id: case.results for case in source.cases}, files)
    return [
        *embed.elements("drawing", drawings),
        *embed.elements("sources", [kept.cases[case.id] for case in source.cases]),
        embed.element("programs", kept.programs),
    ]


def _front(source: Source, title: str) -> Markup:
    values = {
        "title": title, "recorded": source.run is not None, "overall": overall(source), "findings": strongest(source),
        "screen": first_screen(source),
        "matrix": overview.matrix(source), "graphs": [] if source.run is not None else overview.graphs(source),
        "timed": source.timed, "recorded_on": source.recorded_on,
        "some_roofline": any(result.row.roofline_time_us is not None for result in source.shown),
        "some_predicted": any(result.row.predicted_time_us is not None for result in source.shown),
        "bounds": overview.BOUNDS, "warnings": [printable(w, 400) for w in source.warnings], **about.values(source),
        "total": len(source.shown), "cases": len(source.cases),
    }
    return Markup(render("front.html", **values))


def render(name: str, **values: Any) -> str:
    """Return a filled template; all values are escaped."""
    return _environment().get_template(name).render(**values)


def _static(names: Iterable[str]) -> list[Markup]:
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
        number=number, mega=mega, us=formats.number_of_us, about=partial(formats.about_us, interval=True),
        ms=milliseconds, href=overview.href,
        size=formats.size, digits=lambda value: "" if value is None else f"{value:.3g}",
    )
    return environment
