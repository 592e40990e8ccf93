"""Graphs side by side, by the stages of the program, for `xlafuse inspect A B` and `--align`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..base.usage import UsageError, one_of
from ..sources.graph_sources import Contents, GraphSource
from ..spec.blocks import UNFUSED

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ..graph.model import FusionGraph

MOST_FINDINGS = 8


@dataclass(frozen=True)
class SideBySide:
    """Graphs by the names that head their columns. sources: theirs, in order; the first's device prices all bytes."""

    graphs: Mapping[str, FusionGraph]
    sources: Sequence[GraphSource]

    def to_json(self) -> dict[str, Any]:
        from ..graph.analyse.align import align
        from ..graph.render import align_view

        return align_view.to_json(list(self.graphs), align(list(self.graphs.values())))

    def views(self, *, target: str | None, every: bool, ablations: bool = False) -> Iterator[RenderableType]:
        """Yield the table of stages, the gain of fusion (ablations) and the findings.

        target: price bytes by this GPU. Without it, graphs for different targets have no prices. every: all findings.
        ablations: compare with the unfused implementation, where it is among the graphs.
        """
        from ..graph.analyse.ablation import ablation
        from ..graph.analyse.align import align
        from ..graph.findings.collect import findings
        from ..graph.render import align_view, text_view

        names, graphs = list(self.graphs), list(self.graphs.values())
        yield align_view.table(names, graphs, align(graphs))
        for fused, unfused in UNFUSED.items() if ablations else ():
            pair = [self.graphs[name] for name in (fused, unfused) if name in self.graphs]
            if len(pair) == 2 and all(graph.kernels is not None for graph in pair):
                yield text_view.plain("")
                yield align_view.ablation(fused, unfused, ablation(*pair))
        one_device = target is not None or len({graph.target for graph in graphs}) == 1
        ceilings = self.sources[0].ceilings_for(graphs[0], target)[0] if one_device else None
        if sentences := findings(self.graphs, ceilings):
            yield text_view.plain("")
            yield text_view.titled("what stands out", map(str, sentences if every else sentences[:MOST_FINDINGS]))


def labelled(sources: Sequence[GraphSource]) -> SideBySide:
    """Name the graphs by their compilers if these differ, else by modules of one file, else by files."""
    graphs = [each.graph() for each in sources]
    names = [graph.compiler for graph in graphs]
    if len(set(names)) < len(names):
        one_file = len({each.path for each in sources}) == 1
        names = unique(each.name if one_file else each.path.name.split(".")[0] for each in sources)
    return SideBySide(dict(zip(names, graphs, strict=True)), sources)


def unique(names: Iterable[str]) -> list[str]:
    seen: dict[str, int] = {}
    result = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        result.append(name if seen[name] == 1 else f"{name}#{seen[name]}")
    return result


def of_two_runs(
    runs: Sequence[Contents], kept: Sequence[Sequence[GraphSource]], align: Sequence[str] | None
) -> dict[str, SideBySide]:
    """Return each case of which both runs have graphs: of the same implementation, or of those in `align`.

    kept: the records of each run that count. align: an implementation of the first run, and one of the second. Columns
    are headed by the runs' targets, or by their folders where these are equal.
    """
    first, second = (
        {(each.record.case.id, each.record.implementation): each for each in sources
         if each.record is not None and each.read is not None}
        for sources in kept
    )
    if align is None:
        pairs = [(found, found) for found in first if found in second]
    else:
        ours, theirs = (
            one_of("implementation", name, dict.fromkeys(i for _, i in run))
            for name, run in zip(align, (first, second), strict=True)
        )
        pairs = [((case, ours), (case, theirs)) for case, i in first if i == ours and (case, theirs) in second]
    if not pairs:
        wanted = "one implementation" if align is None else f"{align[0]} in the first and {align[1]} in the second"
        raise UsageError(f"{runs[0].path} and {runs[1].path}: no case has graphs of {wanted} in both runs")
    result = {}
    for a, b in pairs:
        graphs = first[a].graph(), second[b].graph()
        where = [graph.target or run.path.name for graph, run in zip(graphs, runs, strict=True)]
        if len(set(where)) == 1:
            where = [run.path.name for run in runs]
        names = unique(f"{i} {place}" for (_, i), place in zip((a, b), where, strict=True))
        title = a[0] if align else f"{a[0]}/{a[1]}"
        result[title] = SideBySide(dict(zip(names, graphs, strict=True)), (first[a], second[b]))
    return result


def by_case(opened: Contents, sources: Iterable[GraphSource], names: Sequence[str]) -> dict[str, SideBySide]:
    """Return each case that has graphs of several of the implementations. A name may be a comma list."""
    cases: dict[str, dict[str, GraphSource]] = {}
    for each in sources:
        if each.record is not None:
            cases.setdefault(each.record.case.id, {})[each.record.implementation] = each
    known = dict.fromkeys(name for found in cases.values() for name in found)
    wanted = [one_of("implementation", name, known) for listed in names for name in listed.split(",")]
    result = {}
    for case, found in cases.items():
        kept = {name: found[name] for name in wanted if name in found and found[name].read is not None}
        if len(kept) > 1:
            result[case] = SideBySide({name: each.graph() for name, each in kept.items()}, list(kept.values()))
    if not result:
        raise UsageError(f"{opened.path}: no case has graphs of several of {', '.join(wanted)}")
    return result
