"""`xlafuse report`: from a run and options to what is printed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from compare.report import rows, table
from compare.report.rows import Row
from compare.selection import UsageError

Warn = Callable[[Iterable[str]], None]


def report(
    run: Path, *, html: Path | None, views: Mapping[str, bool], kernels: bool, as_json: bool, markdown: bool,
    wanted: Mapping[str, list[str]], warn: Warn,
) -> str:
    """What to print. views: "matrix", "roofline", "traffic", "authorship", of which one at most. wanted: fields of rows
    -> names. html: the file to write instead. Raises UsageError, RunFolderError."""
    chosen = [name for name, asked in views.items() if asked]
    if len(chosen) > 1:
        raise UsageError(f"{' and '.join(f'--{name}' for name in chosen)} are different views; choose one")
    view = chosen[0] if chosen else ""
    if as_json and (markdown or view == "matrix"):
        raise UsageError("--json goes with neither --markdown nor --matrix")
    if html is not None:
        if view or kernels or as_json or markdown:
            raise UsageError("--html is a form of its own, with all views in it; name no other")
        return _page(run, html, wanted, warn)
    if kernels and view != "roofline":
        raise UsageError("--kernels goes with --roofline")
    found = rows.read(run, from_graphs=view == "roofline" and not kernels)
    warn(found.warnings)
    selected, render = _view(view, kernels, run, rows.only(found.rows, **wanted))
    return rows.as_json(selected) if as_json else render(selected, markdown=markdown)


def _page(run: Path, out: Path, wanted: Mapping[str, list[str]], warn: Warn) -> str:
    from compare.html import page

    shown = page.write(run, out, wanted)
    warn(shown.warnings)
    size = f"{out.stat().st_size / 1e6:.1f} MB"
    return f"{out}: {len(shown.members)} records of {len(shown.cases)} cases, {size}; open it in a browser"


def _view(view: str, kernels: bool, run: Path, selected: list[Row]) -> tuple[list[Row], Callable[..., str]]:
    """The rows to show, and what renders them; each view's imports wait until it is asked for."""
    if view == "matrix":
        from compare.report import matrix

        return selected, matrix.render
    if view == "traffic":
        from compare.report import traffic

        _require_counted(run, selected)
        return selected, traffic.render
    if view == "authorship":
        from compare.report import authorship

        return authorship.of(selected), authorship.render
    if view == "roofline":
        from compare import opening
        from compare.report import roofline

        if not kernels:
            return selected, roofline.render
        return list(roofline.kernels(opening.contents(run).found, selected)), roofline.render_kernels
    return selected, table.render


def _require_counted(run: Path, selected: list[Row]) -> None:
    if all(row["dram_bytes"] is row["dram_bytes_call"] is row["traffic_unavailable"] is None for row in selected):
        raise UsageError(f"{run}: no traffic was measured; on its GPU, run --out {run} --resume --traffic does it")
