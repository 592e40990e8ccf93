"""`xlafuse inspect A B` and `--align`: graphs side by side, by the stages of the program."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from ..base.text import printable
from ..base.usage import UsageError, one_of
from ..sources.graph_sources import Contents, GraphSource
from .terminal import echo_json, emit

if TYPE_CHECKING:
    from ..cli.inspect import Question
    from ..graph.model import FusionGraph

MOST_FINDINGS = 8
# An implementation, and the one that does the same with nothing fused.
UNFUSED = {"xla": "xla-unfused", "inductor": "eager"}


def show(found: Sequence[GraphSource], question: Question) -> None:
    """Graphs of any origin on one list of stages."""
    from ..graph.analyse.align import align
    from ..graph.render import align_view

    graphs = [each.graph() for each in found]
    names = labels(found, graphs)
    alignment = align(graphs)
    if question.as_json:
        echo_json(align_view.to_json(names, alignment))
        return
    emit(align_view.table(names, graphs, alignment))
    _show_findings(names, graphs, found[0], question)


def labels(found: Sequence[GraphSource], graphs: Sequence[FusionGraph]) -> list[str]:
    """The compilers where each is another one, else the modules where they come from one place, else the files."""
    compilers = [graph.compiler for graph in graphs]
    if len(set(compilers)) == len(compilers):
        return compilers
    if len({each.path for each in found}) == 1:
        return unique(each.name for each in found)
    return unique(each.path.name.split(".")[0] for each in found)


def unique(names: Iterable[str]) -> list[str]:
    seen: dict[str, int] = {}
    result = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        result.append(name if seen[name] == 1 else f"{name}#{seen[name]}")
    return result


def show_choice(opened: Contents, found: Iterable[GraphSource], names: Sequence[str], question: Question) -> None:
    """Of each case of a run, the implementations named ("inductor,triton" are two); of a folder of dumps, modules."""
    from ..graph.analyse.ablation import ablation
    from ..graph.analyse.align import align
    from ..graph.render import align_view
    from ..graph.render import text_view as views

    if opened.kind != "run":
        show([opened.module(name) for name in names], question)
        return
    answers = []
    for case, chosen in _by_case(opened, found, names).items():
        graphs = [each.graph() for each in chosen.values()]
        alignment = align(graphs)
        if question.as_json:
            answers.append({"case": case, **align_view.to_json(list(chosen), alignment)})
            continue
        emit(views.plain(printable(case), "bold"))
        emit(align_view.table(list(chosen), graphs, alignment))
        for fused, unfused in UNFUSED.items():
            if fused in chosen and unfused in chosen:
                pair = chosen[fused].graph(), chosen[unfused].graph()
                if all(graph.kernels is not None for graph in pair):
                    emit(views.plain(""))
                    emit(align_view.ablation(fused, unfused, ablation(*pair)))
        _show_findings(list(chosen), graphs, next(iter(chosen.values())), question)
        emit(views.plain(""))
    if question.as_json:
        echo_json(answers)


def _by_case(opened: Contents, found: Iterable[GraphSource], names: Sequence[str]) -> dict[str, dict[str, GraphSource]]:
    """By case, the records of these implementations that have a graph, where there are several."""
    cases: dict[str, dict[str, GraphSource]] = {}
    for each in found:
        if each.record is not None:
            cases.setdefault(each.record.case.id, {})[each.record.implementation] = each
    known = dict.fromkeys(name for sides in cases.values() for name in sides)
    wanted = [one_of("implementation", name, known) for listed in names for name in listed.split(",")]
    chosen = {
        case: {name: sides[name] for name in wanted if name in sides and sides[name].read is not None}
        for case, sides in cases.items()
    }
    several = {case: sides for case, sides in chosen.items() if len(sides) > 1}
    if not several:
        raise UsageError(f"{opened.path}: no case here has graphs of several of {', '.join(wanted)}")
    return several


def _show_findings(names: Sequence[str], graphs: Sequence[FusionGraph], first: GraphSource, question: Question) -> None:
    from ..graph.findings.collect import findings
    from ..graph.render import text_view as views

    ceilings, _ = first.ceilings_for(graphs[0], question.target)
    if told := findings(dict(zip(names, graphs, strict=True)), ceilings):
        emit(views.plain(""))
        emit(views.titled("what stands out", map(str, told if question.every else told[:MOST_FINDINGS])))
