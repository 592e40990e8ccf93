"""`xlafuse diff`: compare two runs, folders of dumps, or files."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import click

from ..base.text import printable
from ..base.usage import UsageError, one_of
from ..sources.graph_sources import Contents, GraphSource, contents, has_profile
from .options import json_option, names_option, record_filters
from .terminal import echo_json, emit, warn

Pair = tuple[str, GraphSource | None, GraphSource | None]
TOLERANCE = 0.05


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
@click.option("--html", type=click.Path(path_type=Path), metavar="FILE", help="For runs: also write one HTML file.")
@record_filters("For runs: ")
@click.option("--all", "every", is_flag=True, help="Show all changes, not only the largest of many.")
@click.option("--module", metavar="NAME|NUMBER", help="For folders of dumps: only this module.")
@json_option
@click.pass_context
def command(
    ctx: click.Context, a: Path, b: Path, tolerance: str | None, fail_on: list[str], html: Path | None,
    filters: Mapping[str, list[str]], every: bool, module: str | None, as_json: bool,
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
      xlafuse diff runs/jax-0.10 runs/jax-0.11 -i xla --html upgrade.html
      xlafuse diff before.hlo.txt after.hlo.txt
      xlafuse diff runs/step-before runs/step-after

    Exit code 2 when A or B cannot be read, or the options do not fit them.
    """
    if every and as_json:
        raise UsageError("--all lengthens lists in a terminal; --json has all changes")
    if has_profile(a) or has_profile(b):
        options = {
            "--fail-on": fail_on, "--html": html, "--module": module,
            "--block, --case, --direction and -i": any(filters.values()),
        }
        _refuse(options, "with two runs or dumps")
        ctx.exit(1 if _diff_profiles(a, b, tolerance, every=every, as_json=as_json) else 0)
    sides = contents(a), contents(b)
    for side in sides:
        warn(side.warnings)
    if sides[0].kind == sides[1].kind == "run":
        if module is not None:
            raise UsageError("--module selects in a folder of dumps; for runs use --block, --case, --direction and -i")
        failed = _diff_runs(*sides, tolerance, fail_on, html, filters, every=every, as_json=as_json)
    else:
        options = {
            "--tolerance": tolerance, "--fail-on": fail_on, "--html": html, "--all": every,
            "--block, --case, --direction and -i": any(filters.values()),
        }
        both = {name: options.pop(name) for name in ("--tolerance", "--all")}
        _refuse(options, "with two runs")
        _refuse(both, "with two runs or profiles")
        failed = _diff_graphs(*sides, module, as_json=as_json)
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


def _diff_profiles(a: Path, b: Path, tolerance: str | None, *, every: bool, as_json: bool) -> bool:
    """Print what changed between two profiles. Return True where the kernels of a step take longer."""
    from ..report.diff import profiles, profiles_view
    from ..report.profile_view import ProfileView
    from ..sources.profile_sources import open_profile

    if other := next((path for path in (a, b) if not has_profile(path)), None):
        raise UsageError(f"{other}: no profile, and a profile can only be compared with another")
    opened = [open_profile(path) for path in (a, b)]
    warn(f"{each.path}: {each.others}" for each in opened if each.others)
    before, after = (ProfileView(each, each.ceilings(None)) for each in opened)
    found = profiles.compare(before, after, TOLERANCE if tolerance is None else parse_tolerance(tolerance))
    if as_json:
        echo_json(found.to_json())
    else:
        emit(profiles_view.tree(found, f"{a} → {b}", every=every))
    return found.regressed


def _diff_runs(
    a: Contents, b: Contents, tolerance: str | None, fail_on: list[str], html: Path | None,
    filters: Mapping[str, list[str]], *, every: bool, as_json: bool,
) -> bool:
    """Print what changed between two runs. Return True where something regressed."""
    from ..report.diff import runs

    for kind in fail_on:
        one_of("regression", kind, list(runs.REGRESSIONS), where="for --fail-on")
    found = runs.compare(
        a, b, tolerance=TOLERANCE if tolerance is None else parse_tolerance(tolerance),
        fail_on=tuple(fail_on) or runs.DEFAULT_FAIL_ON, wanted=filters,
    )
    if fail_on and not found.judged:
        cards = printable(", ".join(found.other_cards))
        raise UsageError(f"--fail-on goes only with two runs of one GPU; these are of different ones: {cards}")
    warn(found.warnings)
    if html is not None:
        from ..report.diff import page

        page.write(found, html)
    if as_json:
        from ..report.diff.as_json import to_json

        echo_json(to_json(found))
    else:
        from ..report.diff import show

        for view in show.views(found, every=every):
            emit(view)
    return bool(found.regressed)


def _diff_graphs(a: Contents, b: Contents, module: str | None, *, as_json: bool) -> bool:
    """Print what changed between two folders or files. Return True where something differs."""
    from ..graph import formats
    from ..graph.render import text_view

    pairs = match(a, b, module)
    comparable = [pair for pair in pairs if _readable(pair)]
    warn(f"{pair[0]}: no graph recorded on one side, not compared" for pair in pairs if not _readable(pair))
    if not comparable:
        raise UsageError(f"{a.path} and {b.path}: no graph is recorded on both sides")
    answers = [_compare(pair) for pair in comparable]
    changed = [view for data, view in answers if data["differs"]]
    if as_json:
        echo_json([data for data, _ in answers])
    else:
        for view in changed:
            emit(view)
        if same := len(answers) - len(changed):
            emit(text_view.plain(f"no difference in {formats.count(same, 'graph')}"))
    return bool(changed)


def match(a: Contents, b: Contents, module: str | None = None) -> list[Pair]:
    """Pair the graphs of `a` and `b` by name (the second "jit_f" with the second), in the order of `a`.

    A single graph on each side makes a pair whatever the names. Graphs that only `b` has come last.
    """
    if (a.kind == "run") != (b.kind == "run"):
        raise UsageError(f"{a.path} and {b.path}: a run can only be compared with another run")
    old, new = (list(side.graphs) if module is None else side.modules(module) for side in (a, b))
    if len(old) == len(new) == 1:
        return [(f"{_label(old[0])} → {_label(new[0])}", old[0], new[0])]
    left, right = _by_name(old), _by_name(new)
    names = dict.fromkeys((*left, *right))
    return [(name, left.get(name), right.get(name)) for name in names]


def _label(source: GraphSource) -> str:
    return str(source.path) if source.name == source.path.name else f"{source.path} {source.name}"


def _by_name(sources: Iterable[GraphSource]) -> dict[str, GraphSource]:
    """Return the sources by name. Several of one name are numbered in the order in which they were compiled."""
    seen: Counter[str] = Counter()
    result = {}
    for each in sorted(sources, key=lambda each: each.order):
        seen[each.name] += 1
        result[each.name if seen[each.name] == 1 else f"{each.name} #{seen[each.name]}"] = each
    return result


def _readable(pair: Pair) -> bool:
    _, a, b = pair
    return all(side is None or side.read is not None for side in (a, b))


def _compare(pair: Pair) -> tuple[dict[str, Any], Any]:
    """Return the difference as JSON and as a view."""
    from ..graph.analyse.diff import diff as differences
    from ..graph.render import diff_view, text_view

    name, a, b = pair
    if a is None or b is None:
        side = a or b
        assert side is not None
        words = f"{name}: only in {side.path}"
        return {"name": name, "differs": True, "only_in": str(side.path)}, text_view.plain(printable(words), "bold")
    graphs = a.graph(), b.graph()
    try:
        change = differences(*graphs)
    except ValueError as problem:
        raise UsageError(str(problem)) from None
    data = {"name": name, "differs": not change.empty, "only_in": None, **diff_view.to_json(change, *graphs)}
    return data, diff_view.tree(name, change, *graphs)
