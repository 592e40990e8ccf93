"""A run's folder to one HTML file: templates filled, data and libraries embedded (compare.report.page.embed).

The front page is in the file as it is shown; a case's page is a fragment of HTML with its pictures' specifications,
packed with those of other cases and put into the page when its address (#/case/...) is opened.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from ...base import atomic_write, host
from ...base.text import number, printable
from ...graph import formats
from ...graph.findings.finding import Finding
from ...record.run_folder import RunFolderError
from ..palette import colours
from ..table import mega, percent
from . import embed, views
from .content import about, case, charts, headlines, kernels, libraries, overview, reading, records, story
from .content.reading import CaseOf, Run

if TYPE_CHECKING:
    from jinja2 import Environment

_FOLDER = Path(__file__).parent
_STYLES = ("page.css",)
_SCRIPTS = ("page.js", "matrix.js", "charts.js", "records.js")


def write(folder: Path, out: Path, wanted: Mapping[str, Iterable[str]], *, files: bool = True) -> Run:
    """Write the report of a run, or of those records that are wanted (rows.only); what was shown.

    files: what is too large to be in it lies beside it, in "<its stem>-files"; else, or beside what is no regular file,
    it is left out. Raises RunFolderError and UsageError, also where the file cannot be written.
    """
    packages = libraries.read()
    run = reading.read(folder, wanted)
    regular = out.is_file() or not out.exists()
    text = document(run, packages, out.with_name(f"{out.stem}-files") if files and regular else None)
    try:
        atomic_write.write(out, text.encode(errors="replace"))
    except OSError as problem:
        raise RunFolderError(f"{out}: cannot be written: {problem.strerror}") from problem
    return run


def document(run: Run, packages: libraries.Libraries, beside: Path | None) -> str:
    palette = colours(member.name for member in run.members)
    title = printable(f"{run.folder.resolve().name}: fusion report", 200)
    elements = [
        embed.element("settings", {
            "colours": palette, "cases": [c.case.id for c in run.cases],
            "links": [overview.href(each) for each in run.cases],
        }),
        embed.element("rows", records.data(run)),
        embed.text("lib-vega", packages.vega), embed.text("lib-tables", packages.tables),
        embed.text("lib-tables-style", packages.tables_style),
    ]
    told = {each.number: story.told(each) for each in run.cases}
    elements += embed.elements("case", [_case(each, told[each.number], palette) for each in run.cases])
    elements += views.elements(run, beside)
    front = _front(run, title, story.stories(run, told))
    return render(
        "page.html", title=title, front=front, elements=elements, kinds=charts.KINDS,
        styles=_static([*_STYLES, *views.styles()]), scripts=_static([*_SCRIPTS, *views.scripts()]),
        version=host.xlafuse_version(), cases_at_once=embed.AT_ONCE,
    )


def _case(of: CaseOf, told: Sequence[Finding], palette: Mapping[str, str]) -> dict[str, Any]:
    bars = kernels.bars(of)
    html = render("case.html", **case.values(of, told))
    return {"html": html, "charts": case.pictures(of, palette, bars), "bars": bars}


def _front(run: Run, title: str, stories: list[story.Story]) -> Markup:
    shown = overview.matrix(run)
    values = {
        "title": title, "matrix": shown, "timed": run.timed, "stories": stories,
        "bounds": overview.BOUNDS, "warnings": [printable(w, 400) for w in run.warnings], **about.values(run),
        "total": len(run.members), "cases": len(run.cases),
    }
    return Markup(render("front.html", **values))


def render(name: str, **values: Any) -> str:
    """A template of this package, everything in it escaped."""
    return _environment().get_template(name).render(**values)


def _static(names: list[str]) -> list[Markup]:
    """Our own style sheets and scripts; none holds what would end its element (tests/compare/report/page)."""
    return [Markup((_FOLDER / "static" / name).read_text()) for name in names]


@cache
def _environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    made = Environment(
        loader=FileSystemLoader(_FOLDER / "templates"), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters.update(
        number=number, mega=mega, percent=percent, us=formats.number_of_us, span=headlines.span,
        size=formats.size, digits=lambda value: "" if value is None else f"{value:.3g}",
    )
    return made
