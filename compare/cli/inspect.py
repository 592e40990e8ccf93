"""`xlafuse inspect`: from paths and options to what is printed."""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..base.text import printable
from ..base.usage import UsageError, one_of, some, write_file
from ..plan import paired_rounds
from ..report import aligned
from ..report.terminal import echo_json, emit, width
from ..sources.graph_sources import SHOWN_AT_ONCE, Contents, GraphSource, contents, reading_errors_as_usage

if TYPE_CHECKING:
    from ..graph.model import FusionGraph

Warn = Callable[[Iterable[str]], None]

MOST_TREES = 12  # of a run; more records than that are listed, a line each, unless somebody chose them
MOST_LISTED = 50
MOST_NAMED = 12


@dataclass(frozen=True)
class Question:
    """What to show of each graph. None and False: the default view."""

    kernel: str | None = None
    stage: str | None = None
    why: bool = False
    dot: bool = False
    model_explorer: Path | None = None
    passes: bool = False
    every: bool = False
    as_json: bool = False
    target: str | None = None

    def views(self) -> list[str]:
        chosen = {"--kernel": self.kernel, "--stage": self.stage, "--why": self.why, "--dot": self.dot,
                  "--model-explorer": self.model_explorer, "--passes": self.passes}
        return [option for option, value in chosen.items() if value]


def inspect(
    paths: Sequence[Path], question: Question, *, module: str | None, align: tuple[str, str] | None,
    wanted: Mapping[str, list[str]], warn: Warn,
) -> None:
    """Print what the paths hold. wanted: fields of a run's records -> names. Raises UsageError, RunFolderError."""
    views = question.views()
    if len(views) > 1:
        raise UsageError(f"{' and '.join(views)} are different views; choose one")
    if question.dot and question.as_json:
        raise UsageError("--dot is Graphviz text; it does not go with --json")
    if question.model_explorer and question.as_json:
        raise UsageError("--model-explorer writes JSON of its own; it does not go with --json")
    if align and not paths:
        paths, align = [Path(align[0]), Path(align[1])], None
    if not paths:
        raise UsageError("nothing to inspect; name a run folder, a folder or archive of dumps, or one file")
    if (align or len(paths) > 1) and views:
        raise UsageError(f"{views[0]} is about one graph at a time; it does not go with several side by side")
    opened = [contents(path) for path in paths]
    for each in opened:
        warn(each.warnings)
    if len(paths) > 1:
        if any(wanted.values()):
            raise UsageError("--block, --case, --direction and -i choose among the records of one run")
        aligned.show([each.module(module) for each in opened], question)
        return
    (only,) = opened
    found = _chosen(only, module, wanted)
    if align:
        aligned.show_choice(only, found, align, question)
    elif only.kind == "dump" and module is None and len(found) > SHOWN_AT_ONCE:
        if views:
            raise UsageError(f"{only.path}: holds {len(found)} modules; {views[0]} needs --module NAME or NUMBER")
        _list_modules(found, question)
    elif only.kind == "run":
        if len(found) > MOST_TREES and not (views or question.as_json or question.every or any(wanted.values())):
            _list_records(found, warn)
        else:
            _show_records(found, question, warn)
    else:
        show_graphs(found, question)


# Choosing.


def _chosen(opened: Contents, module: str | None, wanted: Mapping[str, list[str]]) -> list[GraphSource]:
    if opened.kind == "run":
        if module is not None:
            raise UsageError("--module chooses in a folder of dumps; of a run use --block, --case, --direction and -i")
        return _records(opened, wanted)
    if any(wanted.values()):
        raise UsageError(f"{opened.path}: no run folder, so that --block, --case, --direction and -i choose nothing")
    return list(opened.graphs) if module is None else opened.modules(module)


def _records(opened: Contents, wanted: Mapping[str, list[str]]) -> list[GraphSource]:
    from ..report.rows import only

    fields = [
        {"number": each.number, "block": each.record.case.block, "case": each.record.case.name,
         "direction": each.record.case.direction, "implementation": each.record.implementation}
        for each in opened.graphs if each.record is not None
    ]
    kept = {row["number"] for row in only(fields, **wanted)}
    return [each for each in opened.graphs if each.number in kept]


# Views.

Pairs = list[tuple[GraphSource, "FusionGraph"]]


def _list_modules(found: list[GraphSource], question: Question) -> None:
    from ..graph import formats
    from ..graph.render import text_view

    if question.as_json:
        echo_json([{"number": e.number, "name": e.name, "id": e.order, "cost": e.cost} for e in found])
        return
    of_xla = any(each.order for each in found)  # a folder of graphs, or of archives, has no numbers of XLA's
    grid = text_view.columns(6, None, *([9] if of_xla else []), 12, right=(0, 2, 3))
    grid.add_row(*map(text_view.plain, ("number", "module", *(["XLA's id"] if of_xla else []), "size")))
    shown = found if question.every else found[:MOST_LISTED]
    for each in shown:
        order = [str(each.order)] if of_xla else []
        cells = (str(each.number), formats.name(each.name), *order, formats.size(each.cost))
        grid.add_row(*map(text_view.plain, cells))
    emit(grid)
    if len(shown) < len(found):
        emit(text_view.plain(f"… and {len(found) - len(shown):,} more; --all lists them"))
    emit(text_view.plain(f"{formats.count(len(found), 'module')}; --module NUMBER or NAME shows one"))


def show_graphs(found: Sequence[GraphSource], question: Question) -> None:
    """Each by itself."""
    from ..graph import store
    from ..sources.explained import Explained

    # As they were compiled; a training step's halves, which a record keeps in one archive, in the order they run.
    pairs = [(each, each.graph()) for each in sorted(found, key=lambda each: (each.order, each.name == "backward"))]
    if question.as_json and not question.views():
        if len(pairs) == 1:
            echo_json(store.to_json(pairs[0][1]))
        else:
            names = aligned.unique(each.name for each, _ in pairs)
            echo_json(Explained({name: graph for name, (_, graph) in zip(names, pairs, strict=True)}).to_json())
    elif question.views():
        _answer(pairs, question)
    else:
        for each, graph in pairs:
            _show_graph(each, graph, question)


def _list_records(found: list[GraphSource], warn: Warn) -> None:
    from ..report import run_graphs

    emit(run_graphs.table([(each, _recorded(each, warn)) for each in found]))


def _show_records(found: list[GraphSource], question: Question, warn: Warn) -> None:
    from ..graph.render import text_view

    pairs = [(each, _recorded(each, warn)) for each in found]
    if question.views():
        known = [(each, replace(graph, name=each.name)) for each, graph in pairs if graph is not None]
        if not known:
            raise UsageError(f"none of {len(found)} records has a graph that can be read")
        _answer(known, question)
    elif question.as_json:
        echo_json([_record_json(each, graph) for each, graph in pairs])
    elif not found:
        emit(text_view.plain("no records"))
    else:
        for each, graph in pairs:
            _show_record(each, graph, question)


def _recorded(each: GraphSource, warn: Warn) -> FusionGraph | None:
    """The record's graph; None, and a warning, where it cannot be read: that costs this record alone."""
    if each.read is None:
        return None
    try:
        return each.graph()
    except UsageError as problem:
        warn([f"{each.name}: {problem}"])
        return None


def _record_json(each: GraphSource, graph: FusionGraph | None) -> dict[str, Any]:
    """What identifies the record, and its graph, or null."""
    from ..graph import store

    record = each.record
    assert record is not None
    case = record.case
    return {
        "id": record.id, "block": case.block, "case": case.name, "direction": case.direction, "dtype": case.dtype,
        "precision": case.precision, "implementation": record.implementation, "status": record.status,
        "detail": record.detail, "segment": record.segment, "target": record.target, "dumps": record.dumps,
        "kernels": record.kernels, "graph": None if graph is None else store.to_json(graph),
    }


def _show_record(each: GraphSource, graph: FusionGraph | None, question: Question) -> None:
    from ..graph.render import text_view

    record = each.record
    assert record is not None
    status = record.status + (f", for {record.target}" if record.target else "")
    notes = [f"{status}: {record.detail}" if record.detail else status]
    for part, made in record.kernels.items():
        if left := made.get("unjoined"):
            notes.append(f"{part}: ran on the device and belongs to no kernel here: {', '.join(map(str, left))}")
    if graph is not None:
        _show_graph(each, graph, question, record.id, notes)
        return
    missing = "no graph recorded" if each.read is None else "its graph cannot be read"
    files = f"; its compiler's files: {each.path / record.dumps}" if record.dumps else ""
    emit(text_view.titled(record.id, [*notes, missing + files]))


def _show_graph(
    each: GraphSource, graph: FusionGraph, question: Question, title: str | None = None, notes: Sequence[str] = ()
) -> None:
    from ..graph.render import text_view

    ceilings, _ = each.ceilings_for(graph, question.target)
    known: dict[str, Any] = {}
    name = None
    if each.record is not None:  # what the block declares is better than what a graph tells
        name = each.record.implementation
        known = {
            "bytes_compulsory": each.record.bytes_compulsory or None, "flops_declared": each.record.flops or None,
            "call_us": paired_rounds.call_us(each.record),
        }
    lines = [*notes, *text_view.totals_lines(graph, ceilings, **known)]
    remarks = text_view.finding_lines(graph, ceilings, name=name)
    emit(text_view.overview(graph, width=width(), every=question.every, title=title, notes=lines, remarks=remarks))


def _answer(pairs: Pairs, question: Question) -> None:
    """One view of each graph."""
    if question.dot:
        from ..graph.render.dot import dot

        for _, graph in pairs:
            click.echo(dot(graph), nl=False)
    elif question.model_explorer is not None:
        _write_model_explorer(pairs, question.model_explorer)
    elif question.kernel is not None:
        _show_kernels(pairs, question.kernel, question)
    elif question.stage is not None:
        _show_stage(pairs, question.stage, question)
    elif question.why:
        from ..report import missed_fusions

        priced = ((graph, *each.ceilings_for(graph, question.target)) for each, graph in pairs)
        missed_fusions.show(priced, as_json=question.as_json, every=question.every)
    else:
        _show_passes(pairs, question)


def _write_model_explorer(pairs: Pairs, file: Path) -> None:
    from ..graph import formats
    from ..graph.render import model_explorer

    names = aligned.unique(each.name for each, _ in pairs)
    graphs = zip(names, (graph for _, graph in pairs), strict=True)
    write_file(file, json.dumps(model_explorer.collection(pairs[0][0].path.name, graphs)).encode())
    click.echo(f"{file}: {formats.count(len(names), 'graph')}; open it in Model Explorer: model-explorer {file}")


def _show_kernels(pairs: Pairs, wanted: str, question: Question) -> None:
    from ..graph.render import text_view

    found = [(each, graph, index) for each, graph in pairs for index in _kernel_indices(graph, wanted)]
    if not found:
        names = list(dict.fromkeys(kernel.name for _, graph in pairs for kernel in graph.kernels or ()))
        one_of("kernel", wanted, names, most=MOST_NAMED)
    if question.as_json:
        echo_json([_kernel_json(graph, index) for _, graph, index in found])
        return
    for each, graph, index in found:
        ceilings, _ = each.ceilings_for(graph, question.target)
        emit(text_view.kernel(graph, index, width=width(), ceilings=ceilings))


def _kernel_json(graph: FusionGraph, index: int) -> dict[str, Any]:
    from ..graph import store

    return {"graph": graph.name, **store.to_json(graph)["kernels"][index]}


def _kernel_indices(graph: FusionGraph, wanted: str) -> list[int]:
    """By number, else by the compiler's or the profiler's name, else by pattern."""
    kernels = list(enumerate(graph.kernels or ()))
    return (
        [i for i, _ in kernels if wanted == str(i + 1)]
        or [i for i, kernel in kernels if wanted in (kernel.name, kernel.runtime_name)]
        or [i for i, kernel in kernels if fnmatch.fnmatchcase(kernel.name, wanted)]
    )


def _show_stage(pairs: Pairs, wanted: str, question: Question) -> None:
    from ..graph.render import text_view

    found = []
    for _, graph in pairs:
        kernels = enumerate(graph.kernels or ())
        if indices := [i for i, kernel in kernels if any(in_stage(stage, wanted) for stage in kernel.stages)]:
            found.append((graph, indices))
    if not found:
        stages = list(dict.fromkeys(s for _, graph in pairs for kernel in graph.kernels or () for s in kernel.stages))
        one_of("stage", wanted, stages, most=MOST_NAMED)
    if question.as_json:
        echo_json([_kernel_json(graph, index) for graph, indices in found for index in indices])
        return
    for graph, indices in found:
        emit(text_view.stage(graph, wanted, indices, width=width(), every=question.every))


def in_stage(stage: str, wanted: str) -> bool:
    """Whether `wanted` is the stage or scopes within it: "norm" holds "norm/scale" and "layer/norm/scale"."""
    return f"/{wanted.strip('/')}/" in f"/{stage}/"


def _show_passes(pairs: Pairs, question: Question) -> None:
    from xlafuse.reasons.pass_changes import read_pass_changes

    from ..graph.render import text_view

    compiled = [(each, each.compiled()) for each, _ in pairs]
    without = [printable(each.name, 60) for each, modules in compiled if not modules]
    others = some(without, MOST_NAMED)
    if len(without) == len(pairs):
        raise UsageError(
            f"{pairs[0][0].path}: no dump of XLA's of {others}; --passes needs one: a dump folder, an archive of it, "
            "or a run's record that XLA compiled"
        )
    answers = []
    for each, name, artifacts in ((each, *module) for each, modules in compiled for module in modules):
        with reading_errors_as_usage(each.path):
            changes = read_pass_changes(artifacts)
        if question.as_json:
            passes = [{**asdict(change), "text": str(change)} for change in changes]
            answers.append({"module": name, "passes": passes})
        else:
            nothing = ["no snapshots between passes; XLA writes them with --xla_dump_hlo_pass_re=.*"]
            emit(text_view.titled(name, [str(change) for change in changes] or nothing))
    if question.as_json:
        echo_json(answers)
    elif without:
        emit(text_view.plain(f"no dump of XLA's: {others}"))
