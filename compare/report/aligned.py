"""Several paths side by side: their results as cases."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from ..base.usage import UsageError
from ..sources.case_results import CaseResults
from ..sources.result import Result
from ..sources.source import Source, cases_of_graphs


def side_by_side(sources: Sequence[Source]) -> Source:
    """Return several paths' results as cases: those of two runs by record, others as one case of one graph each.

    Raises UsageError where runs have no record in common, or another path has several graphs.
    """
    if all(source.run is not None for source in sources) and len(sources) == 2:
        cases = _common_cases(*sources)
    else:
        results = [source.module(None) for source in sources]
        names = _labels(results)
        results = [result.labelled(name) for result, name in zip(results, names, strict=True)]
        cases = tuple(cases_of_graphs([(" and ".join(names), results)]))
    name = " and ".join(dict.fromkeys(source.name for source in sources))
    shown = tuple(result for case in cases for result in case.results)
    return Source("file", Path(name), shown, put_together=cases)


def _labels(results: Sequence[Result]) -> list[str]:
    """Name graphs by their compilers if these differ, else by modules of one file, else by files."""
    names = [result.load().compiler for result in results]
    if len(set(names)) < len(names):
        one_file = len({result.path for result in results}) == 1
        names = unique(result.id if one_file else result.path.name.split(".")[0] for result in results)
    return names


def unique(names: Iterable[str]) -> list[str]:
    """Return the names; a repeated one gets a number."""
    seen = Counter[str]()
    result = []
    for name in names:
        seen[name] += 1
        result.append(name if seen[name] == 1 else f"{name}#{seen[name]}")
    return result


def _common_cases(a: Source, b: Source) -> tuple[CaseResults, ...]:
    """Return each record that has a graph in both runs, headed by the runs' targets, or by their folders if equal.

    Times are left out: those of several runs are not comparable.
    """
    first, second = (
        {result.id: result for result in source.results if result.read is not None} for source in (a, b)
    )
    groups = []
    for id in (id for id in first if id in second):
        pair = first[id], second[id]
        places = [result.load().target or source.path.name for result, source in zip(pair, (a, b), strict=True)]
        if len(set(places)) == 1:
            places = [source.path.name for source in (a, b)]
        names = unique(f"{result.name} {place}" for result, place in zip(pair, places, strict=True))
        groups.append((id, [result.labelled(name) for result, name in zip(pair, names, strict=True)]))
    if not groups:
        raise UsageError(f"{a.path} and {b.path}: no case has graphs of one implementation in both runs")
    return tuple(cases_of_graphs(groups))
