"""`xlafuse report`: from a run and options to what is printed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from xlafuse.hlo.gc_pause import collector_paused

from ..base.usage import UsageError
from ..graph.analyse.roofline import Ceilings
from ..graph.formats import microseconds
from ..record.run_folder import read_run
from ..report import data, rows, table
from ..report.rows import Row

Warn = Callable[[Iterable[str]], None]


@collector_paused()
def report(
    run: Path, *, html: Path | None, files: bool, views: Mapping[str, bool], kernels: bool, form: str,
    picture: Path | None, wanted: Mapping[str, list[str]], warn: Warn,
) -> str:
    """What to print. views: "findings", "matrix", "roofline", "traffic", "authorship", of which one at most. form:
    "text", "markdown", "json" or "csv". html, picture: a file to write instead; files: others beside the page, too.
    wanted: fields of rows -> names.

    Raises UsageError, RunFolderError.
    """
    chosen = [name for name, asked in views.items() if asked]
    if len(chosen) > 1:
        raise UsageError(f"{' and '.join(f'--{name}' for name in chosen)} are different views; choose one")
    view = chosen[0] if chosen else ""
    if form in ("json", "csv") and view == "matrix":
        raise UsageError(f"--matrix is a view of few numbers; --{form} without it has all of them")
    if not files and html is None:
        raise UsageError("--no-files goes with --html")
    if html is not None:
        if view or kernels or picture or form != "text":
            raise UsageError("--html is a form of its own, with all views in it; name no other")
        return _page(run, html, files, wanted, warn)
    if kernels and view != "roofline":
        raise UsageError("--kernels goes with --roofline")
    if picture is not None and (kernels or view not in ("", "roofline") or form != "text"):
        raise UsageError("--picture draws times, or with --roofline the roofline; it goes with no other form or view")
    if view == "findings":
        return _findings(run, form, wanted, warn)
    found = rows.read(run, from_graphs=view == "roofline" and not kernels)
    warn(found.warnings)
    chosen_rows = rows.only(found.rows, **wanted)
    if picture is not None:
        return _drawn(picture, view, run, found.rows, chosen_rows)
    selected, render = _view(view, kernels, run, chosen_rows)
    if form in ("json", "csv"):
        return _as_data(selected, form)
    return render(selected, markdown=form == "markdown")


def _as_data(of: list[Row], form: str) -> str:
    return data.as_json(of) if form == "json" else data.as_csv(of).removesuffix("\n")


def form_of(*, as_json: bool, as_csv: bool, markdown: bool) -> str:
    """Raises UsageError where more than one is asked for."""
    asked = [name for name, wanted in (("json", as_json), ("csv", as_csv), ("markdown", markdown)) if wanted]
    if len(asked) > 1:
        raise UsageError(f"{' and '.join(f'--{name}' for name in asked)} are different forms; choose one")
    return asked[0] if asked else "text"


def _findings(run: Path, form: str, wanted: Mapping[str, list[str]], warn: Warn) -> str:
    """What costs most, in words; the front page of the HTML begins with the same."""
    from ..report.page.content import reading, story

    read = reading.read(run, wanted)
    warn(read.warnings)
    found = story.stories(read, {case.number: story.told(case) for case in read.cases})
    if form in ("json", "csv"):
        of_stories: list[Row] = [
            {"at_stake_us": each.at_stake_us, "finding": each.headline, "case": each.case, "sort": each.sort}
            for each in found
        ]
        return _as_data(of_stories, form)
    shown = table.escaped if form == "markdown" else str
    lines = [
        f"{number}. {shown(each.headline)} ({shown(each.case)}: {microseconds(each.at_stake_us)} at stake)"
        for number, each in enumerate(found, 1)
    ]
    return "\n".join(lines) or "nothing in the graphs of these records can be priced"


def _drawn(file: Path, view: str, run: Path, every: list[Row], chosen: list[Row]) -> str:
    from ..report import picture

    colours = picture.colours(every)
    if view == "roofline":
        spec = picture.roofline(chosen, _ceilings(run), colours)
    else:
        spec = picture.times(chosen, colours)
    picture.write(file, spec)
    return f"{file}: drawn"


def _ceilings(run: Path) -> dict[str, Ceilings]:
    try:
        return rows.ceilings_of(read_run(run))
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as problem:
        raise UsageError(f"{run / 'run.json'}: its segments cannot be read: {problem!r}") from None


def _page(run: Path, out: Path, files: bool, wanted: Mapping[str, list[str]], warn: Warn) -> str:
    from ..report.page import page

    shown = page.write(run, out, wanted, files=files)
    warn(shown.warnings)
    size = f", {out.stat().st_size / 1e6:.1f} MB" if out.is_file() else ""
    return f"{out}: {len(shown.members)} records of {len(shown.cases)} cases{size}; open it in a browser"


def _view(view: str, kernels: bool, run: Path, selected: list[Row]) -> tuple[list[Row], Callable[..., str]]:
    """The rows to show, and what renders them; each view's imports wait until it is asked for."""
    if view == "matrix":
        from ..report import matrix

        return selected, matrix.render
    if view == "traffic":
        from ..report import traffic

        _require_counted(run, selected)
        return selected, traffic.render
    if view == "authorship":
        from ..report import authorship

        return authorship.of(selected), authorship.render
    if view == "roofline":
        from ..report import roofline
        from ..sources import graph_sources

        if not kernels:
            return selected, roofline.render
        return list(roofline.kernels(graph_sources.contents(run).graphs, selected)), roofline.render_kernels
    return selected, table.render


def _require_counted(run: Path, selected: list[Row]) -> None:
    if all(row["dram_bytes"] is row["dram_bytes_call"] is row["traffic_unavailable"] is None for row in selected):
        raise UsageError(f"{run}: no traffic was measured; on its GPU, run --out {run} --resume --traffic does it")
