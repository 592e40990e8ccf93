"""`xlafuse diff`: what changed between two runs, folders of dumps, or files."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..base.text import printable
from ..base.usage import UsageError
from ..report.terminal import echo_json, emit
from ..sources.graph_sources import Contents, GraphSource, contents

Pair = tuple[str, GraphSource | None, GraphSource | None]


@dataclass(frozen=True)
class RunQuestion:
    """What is asked of two runs. tolerance: relative. fail_on: of compare.report.diff.runs.REGRESSIONS, none: the
    default. html: a file to write. wanted: fields of the runs' rows -> names."""

    tolerance: float | None = None
    fail_on: tuple[str, ...] = ()
    html: Path | None = None
    every: bool = False
    wanted: Mapping[str, list[str]] = field(default_factory=dict)

    def asked(self) -> list[str]:
        """The options that were given."""
        given = {
            "--tolerance": self.tolerance is not None, "--fail-on": self.fail_on, "--html": self.html,
            "--all": self.every, "--block, --case, --direction and -i": any(self.wanted.values()),
        }
        return [option for option, value in given.items() if value]


TOLERANCE = 0.05


def diff(
    a: Path, b: Path, *, module: str | None, as_json: bool, of_runs: RunQuestion,
    warn: Callable[[Iterable[str]], None],
) -> bool:
    """Print what changed, and say whether the exit code is to be 1: where two runs regressed, or anything else differs.

    Raises UsageError, RunFolderError.
    """
    sides = contents(a), contents(b)
    for side in sides:
        warn(side.warnings)
    if sides[0].kind == sides[1].kind == "run":
        if module is not None:
            raise UsageError("--module chooses in a folder of dumps; of runs use --block, --case, --direction and -i")
        return _runs(*sides, of_runs, as_json, warn)
    if asked := of_runs.asked():
        raise UsageError(f"{' and '.join(asked)} {'goes' if len(asked) == 1 else 'go'} with two runs alone")
    return _graphs(*sides, module, as_json, warn)


def tolerance(text: str) -> float:
    """Of "5%" or "0.05". Raises UsageError for what is neither, or not from 0 to 100%."""
    match = re.fullmatch(r"(\d{1,3}(?:\.\d{1,9})?)\s*(%?)", text.strip())
    value = float(match[1]) / (100 if match[2] else 1) if match else -1.0
    if not 0 <= value < 1:
        raise UsageError(f"--tolerance {printable(text, 40)!r}: expected a share such as 5% or 0.05, below 100%")
    return value


def _runs(
    a: Contents, b: Contents, question: RunQuestion, as_json: bool, warn: Callable[[Iterable[str]], None]
) -> bool:
    from ..report.diff import runs

    fail_on = question.fail_on or runs.DEFAULT_FAIL_ON
    share = TOLERANCE if question.tolerance is None else question.tolerance
    found = runs.compare(a, b, tolerance=share, fail_on=fail_on, wanted=question.wanted)
    warn(found.warnings)
    if question.html is not None:
        from ..report.diff import page

        page.write(found, question.html)
    if as_json:
        from ..report.diff.as_json import to_json

        echo_json(to_json(found))
    else:
        from ..report.diff import show

        for view in show.views(found, every=question.every):
            emit(view)
    return bool(found.regressed)


def _graphs(
    a: Contents, b: Contents, module: str | None, as_json: bool, warn: Callable[[Iterable[str]], None]
) -> bool:
    pairs = match(a, b, module)
    comparable = [pair for pair in pairs if _readable(pair)]
    warn(f"{pair[0]}: no graph recorded on one side, not compared" for pair in pairs if not _readable(pair))
    if not comparable:
        raise UsageError(f"{a.path} and {b.path}: nothing here has a graph on both sides")
    answers = [_compared(pair) for pair in comparable]
    if as_json:
        echo_json([data for data, _ in answers])
    else:
        _print(answers)
    return any(data["differs"] for data, _ in answers)


def _print(answers: list[tuple[dict[str, Any], Any]]) -> None:
    from ..graph import formats
    from ..graph.render import text_view

    for data, view in answers:
        if data["differs"]:
            emit(view)
    same = sum(not data["differs"] for data, _ in answers)
    if same:
        emit(text_view.plain(f"no difference in {formats.count(same, 'graph')}"))


def match(a: Contents, b: Contents, module: str | None = None) -> list[Pair]:
    """What of `a` is compared with what of `b`: modules by name (the second "jit_f" with the second).

    One graph on each side are compared whatever they are called. In the order of `a`, then what `b` has alone.
    """
    if (a.kind == "run") != (b.kind == "run"):
        raise UsageError(f"{a.path} and {b.path}: a run can be compared with another run alone")
    old, new = (list(side.graphs) if module is None else side.modules(module) for side in (a, b))
    if len(old) == len(new) == 1:
        return [(f"{_label(old[0])} → {_label(new[0])}", old[0], new[0])]
    left, right = _by_name(old), _by_name(new)
    names = dict.fromkeys((*left, *right))
    return [(name, left.get(name), right.get(name)) for name in names]


def _label(found: GraphSource) -> str:
    return str(found.path) if found.name == found.path.name else f"{found.path} {found.name}"


def _by_name(found: Iterable[GraphSource]) -> dict[str, GraphSource]:
    """Names of modules carry no number of the compile; several of one name are told apart by their order there."""
    seen: Counter[str] = Counter()
    result = {}
    for each in sorted(found, key=lambda each: each.order):
        seen[each.name] += 1
        result[each.name if seen[each.name] == 1 else f"{each.name} #{seen[each.name]}"] = each
    return result


def _readable(pair: Pair) -> bool:
    _, a, b = pair
    return all(side is None or side.read is not None for side in (a, b))


def _compared(pair: Pair) -> tuple[dict[str, Any], Any]:
    """As JSON, and to print."""
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
