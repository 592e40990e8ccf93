"""Cases whose results stand side by side by the stages of the program, also of several paths."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..base.usage import UsageError
from ..sources.case_results import CaseResults
from ..sources.result import Result
from ..sources.source import Source, cases_of_graphs
from ..spec.blocks import UNFUSED

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ..graph.model import FusionGraph

MOST_FINDINGS = 8


def to_json(case: CaseResults) -> dict[str, Any]:
    """Return the stages of a case's graphs."""
    from ..graph.analyse.align import align
    from ..graph.render import align_view

    graphs = _graphs(case)
    return align_view.to_json(list(graphs), align(list(graphs.values())))


def views(case: CaseResults, *, target: str | None, every: bool) -> Iterator[RenderableType]:
    """Yield the table of stages, the gain of fusion in a run's case, and the findings.

    target: price bytes by this GPU. Without it, graphs for different targets have no prices. every: all findings.
    """
    from ..graph.analyse.ablation import ablation
    from ..graph.analyse.align import align
    from ..graph.findings.collect import findings
    from ..graph.render import align_view, text_view

    graphs = _graphs(case)
    yield align_view.table(list(graphs), list(graphs.values()), align(list(graphs.values())))
    for fused, unfused in UNFUSED.items():
        pair = [graphs[name] for name in (fused, unfused) if name in graphs]
        if len(pair) == 2 and all(graph.kernels is not None for graph in pair):
            yield text_view.plain("")
            yield align_view.ablation(fused, unfused, ablation(*pair))
    one_device = target is not None or len({graph.target for graph in graphs.values()}) == 1
    first = next(result for result in case.results if result.graph is not None)
    ceilings = first.priced_for(target)[0] if one_device else None
    if sentences := findings(graphs, ceilings):
        yield text_view.plain("")
        yield text_view.titled("what stands out", map(str, sentences if every else sentences[:MOST_FINDINGS]))


def _graphs(case: CaseResults) -> dict[str, FusionGraph]:
    return {result.name: result.graph for result in case.results if result.graph is not None}


def side_by_side(sources: Sequence[Source]) -> Source:
    """Return several paths' results as cases: those of two runs by record, others as one case of one graph each.

    Raises UsageError where runs have no record in common, or another path has several graphs.
    """
    if all(source.run is not None for source in sources) and len(sources) == 2:
        return _put_together(sources, _common_cases(*sources))
    results = [source.module(None) for source in sources]
    names = _labels(results)
    results = [result.labelled(name) for result, name in zip(results, names, strict=True)]
    return _put_together(sources, cases_of_graphs([(" and ".join(names), results)]))


def _put_together(sources: Sequence[Source], cases: Iterable[CaseResults]) -> Source:
    made = tuple(cases)
    name = " and ".join(dict.fromkeys(source.name for source in sources))
    results = tuple(result for case in made for result in case.results)
    return Source("file", Path(name), results, put_together=made)


def _labels(results: Sequence[Result]) -> list[str]:
    """Name graphs by their compilers if these differ, else by modules of one file, else by files."""
    names = [result.load().compiler for result in results]
    if len(set(names)) < len(names):
        one_file = len({result.path for result in results}) == 1
        names = unique(result.id if one_file else result.path.name.split(".")[0] for result in results)
    return names


def unique(names: Iterable[str]) -> list[str]:
    """Return the names; a repeated one gets a number."""
    seen: dict[str, int] = {}
    result = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        result.append(name if seen[name] == 1 else f"{name}#{seen[name]}")
    return result


def _common_cases(a: Source, b: Source) -> Iterable[CaseResults]:
    """Return each record that has a graph in both runs, headed by the runs' targets, or by their folders if equal.

    Times are left out: those of several runs are not comparable.
    """
    first, second = (
        {result.id: result for result in source.results if result.read is not None} for source in (a, b)
    )
    pairs = [(first[id], second[id]) for id in first if id in second]
    if not pairs:
        raise UsageError(f"{a.path} and {b.path}: no case has graphs of one implementation in both runs")
    groups = []
    for pair in pairs:
        places = [result.load().target or source.path.name for result, source in zip(pair, (a, b), strict=True)]
        if len(set(places)) == 1:
            places = [source.path.name for source in (a, b)]
        names = unique(f"{result.name} {place}" for result, place in zip(pair, places, strict=True))
        groups.append((pair[0].id, [result.labelled(name) for result, name in zip(pair, names, strict=True)]))
    return cases_of_graphs(groups)


def with_several_graphs(source: Source) -> list[CaseResults]:
    """Return the cases that have several graphs. Raises UsageError where none has."""
    cases = [case for case in source.cases if sum(result.graph is not None for result in case.results) > 1]
    if not cases:
        raise UsageError(f"{source.path}: no case has several graphs to show side by side{source.unreadable_example}")
    return cases
