"""`xlafuse diff`: show what changed between two paths."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

from ..base.text import printable
from ..base.usage import UsageError, one_of, write_file
from ..report.outline import Outline
from ..sources.opening import open_source
from ..sources.source import Source
from .options import json_option, names_option, record_filters
from .selection import rank_option
from .terminal import show, warn

TOLERANCE = 0.05
FORMS = (".html", ".md", ".json")


@click.command("diff")
@click.argument("a", type=click.Path(path_type=Path))
@click.argument("b", type=click.Path(path_type=Path))
@click.option(
    "--tolerance", metavar="SHARE",
    help="For runs and profiles: ignore changes of times and bytes up to this share. Default: 5%.",
)
@names_option(
    "--fail-on", "fail_on", metavar="slower|launch-gap|status|kernels|bytes|missing",
    help="For runs: the changes that make exit code 1. Default: all but launch-gap.",
)
@click.option(
    "-o", "--out", type=click.Path(path_type=Path), metavar="FILE",
    help=f"Also write the changes to a file; its ending is its form: {', '.join(FORMS)}.",
)
@record_filters("For runs: ")
@click.option("--module", metavar="NAME|NUMBER", help="For folders of dumps: only this module.")
@rank_option
@click.option("--all", "every", is_flag=True, help="Whole lists, not only the largest changes of many.")
@json_option
@click.pass_context
def command(
    ctx: click.Context, a: Path, b: Path, tolerance: str | None, fail_on: list[str], out: Path | None,
    filters: Mapping[str, list[str]], module: str | None, rank: int | None, every: bool, as_json: bool,
) -> None:
    """Show what changed from A to B, as before and after an upgrade.

    Two runs: first the versions and flags that differ. Then cases that became faster or slower as far as both runs'
    rounds can tell, became right or wrong, are new or gone, or are fused differently. Exit code 1 where something is
    slower, no longer right, launches more kernels, moves more bytes or is gone (--fail-on), else 0. Between different
    GPUs, nothing counts as a regression.

    Two folders of dumps, or files, as for `inspect`: kernels that split, merged, appeared or vanished, arrays that are
    newly written to memory, and changed reasons for not fusing; most bytes first. Names and numbers that the compiler
    assigns do not count as a difference. Exit code 1 where something differs, else 0.

    Two profiles, or folders of `xlafuse capture`: kernels that are new, gone, slower or faster in a median step, beyond
    the spread of the steps and the tolerance. Exit code 1 where the kernels of a step take longer, else 0.

    \b
      xlafuse diff runs/yesterday runs/today --tolerance 3%
      xlafuse diff runs/jax-0.10 runs/jax-0.11 -i xla -o upgrade.html
      xlafuse diff before.hlo.txt after.hlo.txt
      xlafuse diff runs/step-before runs/step-after

    Exit code 2 when A or B cannot be read, or the options do not fit them.
    """
    if out is not None and out.suffix.lower() not in FORMS:
        raise UsageError(f"{out}: the ending is the form; expected {', '.join(FORMS)}")
    before, after = (open_source(path, rank=rank) for path in (a, b))
    profiles = [source for source in (before, after) if source.profile is not None]
    two_runs = before.run is not None and after.run is not None
    if not two_runs or module is not None:
        before, after = (source.select(filters, module) for source in (before, after))
    if not two_runs:
        _refuse({"--fail-on": fail_on}, "with two runs")
    if not two_runs and not profiles:
        _refuse({"--tolerance": tolerance, "--all": every}, "with two runs or profiles")
    share = TOLERANCE if tolerance is None else parse_tolerance(tolerance)
    page: Callable[[], str] | None = None
    if profiles:
        outline, failed = _profiles(before, after, share, every=every)
    elif two_runs:
        outline, failed, page = _runs(before, after, share, fail_on, filters, every=every)
    else:
        from ..report.diff import graphs

        warn([*before.warnings, *after.warnings])
        outline, failed = graphs.compare(before, after)
    show(outline, as_json=as_json)
    if out is not None:
        _write(outline, page, out, f"{a} → {b}")
    ctx.exit(1 if failed else 0)


def _refuse(options: Mapping[str, Any], where: str) -> None:
    if given := [option for option, value in options.items() if value]:
        raise UsageError(f"{' and '.join(given)} {'goes' if len(given) == 1 else 'go'} only {where}")


def parse_tolerance(text: str) -> float:
    """Return "5%" or "0.05" as 0.05. Raises UsageError for anything else, and outside 0 to 100%."""
    match = re.fullmatch(r"(\d{1,3}(?:\.\d{1,9})?)\s*(%?)", text.strip())
    value = float(match[1]) / (100 if match[2] else 1) if match else -1.0
    if not 0 <= value < 1:
        raise UsageError(f"--tolerance {printable(text, 40)!r}: expected a share such as 5% or 0.05, below 100%")
    return value


def _profiles(a: Source, b: Source, tolerance: float, *, every: bool) -> tuple[Outline, bool]:
    """Return what changed between two profiles, and whether the kernels of a step take longer."""
    from ..report.diff import profiles
    from ..report.profile_view import ProfileView

    def view(source: Source) -> ProfileView:
        if source.profile is None:
            raise UsageError(f"{source.path}: no profile, and a profile can only be compared with another")
        warn([f"{source.path}: {source.profile.others}"] if source.profile.others else [])
        return ProfileView(source.profile, source.profile.ceilings(None))

    change = profiles.compare(view(a), view(b), tolerance)
    tree = profiles.tree(change, f"{a.path} → {b.path}", every=every)
    return Outline(change.to_json, lambda: [tree]), change.regressed


def _runs(
    a: Source, b: Source, tolerance: float, fail_on: list[str], filters: Mapping[str, list[str]], *, every: bool
) -> tuple[Outline, bool, Callable[[], str]]:
    """Return what changed between two runs, whether something regressed, and a function that returns its page."""
    from ..report.diff import runs
    from ..report.diff import show as runs_view

    for kind in fail_on:
        one_of("regression", kind, list(runs.REGRESSIONS), where="for --fail-on")
    change = runs.compare(
        a, b, tolerance=tolerance, fail_on=tuple(fail_on) or runs.DEFAULT_FAIL_ON, wanted=filters
    )
    if fail_on and not change.judged:
        cards = printable(", ".join(change.other_cards))
        raise UsageError(f"--fail-on goes only with two runs of one GPU; these are of different ones: {cards}")
    warn(change.warnings)
    outline = Outline(change.to_json, lambda: runs_view.views(change, every=every))
    return outline, bool(change.regressed), lambda: runs_view.html(change)


def _write(outline: Outline, page: Callable[[], str] | None, out: Path, title: str) -> None:
    forms = {".html": page or (lambda: outline.html(title)), ".md": outline.markdown, ".json": outline.json}
    write_file(out, forms[out.suffix.lower()]().encode(errors="replace"))
    click.echo(f"{out}: written", err=True)
