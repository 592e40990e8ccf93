"""The views of fusion graphs: kernels, missed fusions, stages side by side, XLA's passes, the steps of a profile."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from msgspec import to_builtins

from ..base.text import printable
from ..base.usage import UsageError, join_some, one_of
from ..plan import paired_rounds
from ..sources.case_results import CaseResults
from ..sources.result import Result, reading_errors_as_usage
from ..sources.source import SHOWN_AT_ONCE, Source
from ..spec.blocks import UNFUSED
from . import aligned
from .columns import unmeasured_time
from .outline import Outline

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ..graph.model import FusionGraph

MOST_TREES = 12  # a run with more records is listed, one line each, unless the user selected records
MOST_LISTED = 50
MOST_NAMED = 12
MOST_FINDINGS = 8


@dataclass(frozen=True)
class Shown:
    """The share of a source that graph views show.

    every: whole lists. selected: the user chose records or a module. kernel: a kernel's name or number, or none.
    price_as: the GPU that prices bytes instead of the run's or the compile's. width: of the terminal.
    """

    every: bool = False
    selected: bool = False
    kernel: str | None = None
    price_as: str | None = None
    width: int = 80


def kernels(source: Source, shown: Shown) -> Outline:
    """The kernels of each graph in the order they run, with their operations, bytes and times."""
    if shown.kernel is not None:
        return _kernels_named(source, shown.kernel, shown)
    require_graphs(source)
    many = MOST_TREES if source.run is not None else SHOWN_AT_ONCE
    listed = len(source.results) > many and not shown.selected and (source.kind == "dump" or not shown.every)
    if listed and shown.price_as is not None:
        raise UsageError(f"{source.path}: a list of {len(source.results)} graphs has no prices for --price-as")
    if source.run is not None:
        return Outline(
            lambda: {"schema": "xlafuse.records/1", "records": [_record_json(result) for result in source.results]},
            lambda: (
                _list_of_records(source.results) if listed and source.kind == "run" else _records(source, shown)
            ),
        )
    if listed and source.kind == "dump":
        return _modules(source, shown)
    return Outline(lambda: _graphs_json(source), lambda: [_tree(result, shown) for result in in_order(source.results)])


def in_order(results: Sequence[Result]) -> list[Result]:
    """Return the results in the order of compilation; a record's archive has forward and backward without numbers."""
    return sorted(results, key=lambda result: (result.order, result.id == "backward"))


def _graphs_json(source: Source) -> dict[str, Any]:
    from ..graph import store
    from ..sources.explained import Explained

    graphs = [result.load() for result in in_order(source.results)]
    if len(graphs) == 1:
        return store.to_json(source.results[0].timed_graph or graphs[0])
    names = aligned.unique(result.id for result in in_order(source.results))
    return Explained(dict(zip(names, graphs, strict=True))).to_json()


def _modules(source: Source, shown: Shown) -> Outline:
    """List the modules of a folder."""
    from ..graph import formats
    from ..graph.render import text_view

    results = source.results

    def views() -> Iterator[RenderableType]:
        of_xla = any(result.order for result in results)  # folders of graphs or of archives have no numbers of XLA's
        grid = text_view.columns(6, None, *([9] if of_xla else []), 12, right=(0, 2, 3))
        kept = results if shown.every else results[:MOST_LISTED]
        lines = [(str(r.number), formats.name(r.id), str(r.order), formats.size(r.cost)) for r in kept]
        for number, module, order, size in [("number", "module", "XLA's id", "size"), *lines]:
            grid.add_row(*map(text_view.plain, (number, module, *([order] if of_xla else []), size)))
        yield grid
        if len(kept) < len(results):
            yield text_view.plain(f"… and {len(results) - len(kept):,} more; --all lists them")
        yield text_view.plain(f"{formats.count(len(results), 'module')}; --module NUMBER or NAME shows one")

    def rows() -> list[dict[str, Any]]:
        return [{"number": r.number, "name": r.id, "id": r.order, "cost": r.cost} for r in results]

    return Outline(lambda: {"schema": "xlafuse.modules/1", "modules": rows()}, views, rows=rows)


def _record_json(result: Result) -> dict[str, Any]:
    """Return the record's identity with its graph, or null in its place."""
    from ..graph import store

    record, graph = result.record, result.timed_graph
    assert record is not None
    case = record.case
    return {
        "id": record.id, "block": case.block, "case": case.name, "direction": case.direction, "dtype": case.dtype,
        "precision": case.precision, "implementation": record.implementation, "status": record.status,
        "detail": record.detail, "segment": record.segment, "target": record.target, "dumps": record.dumps,
        "kernels": to_builtins(record.kernels), "graph": None if graph is None else store.to_json(graph),
    }


def _list_of_records(results: Sequence[Result]) -> Iterator[RenderableType]:
    """Yield the kernels, declared bytes, fusion efficiency and time of each record's graph, below its case."""
    from ..graph.render import text_view

    grid = text_view.columns(None, 8, 9, 11, 9, right=(1, 2, 3, 4), gap=1)
    grid.add_row(*map(text_view.plain, ("", "kernels", "declared", "efficiency", "µs")))
    case = ""
    for result in results:
        assert result.record is not None
        if result.record.case.id != case:
            case = result.record.case.id
            grid.add_row(text_view.plain(printable(case), "bold"))
        cells = (f"  {printable(result.record.implementation, 30)}", *_totals_cells(result))
        grid.add_row(*map(text_view.plain, cells))
    yield grid
    yield text_view.plain(
        "\ndeclared: bytes that the kernels read and write. efficiency: compulsory bytes over those.\n"
        "µs: sum of the kernels' measured times; without a GPU the call's recorded time, or a predicted one (~).\n"
        "--block, --case, --direction and -i select records and show their kernels; --all shows the kernels of all."
    )


def _totals_cells(result: Result) -> tuple[str, str, str, str]:
    from ..graph import formats
    from ..graph.analyse.totals import totals

    graph, record = result.graph, result.record
    assert record is not None
    if graph is None:
        return "no graph", "", "", printable(record.status, 9)
    sums = totals(graph, bytes_compulsory=record.bytes_compulsory or None)
    kernels = formats.UNKNOWN if sums.kernels is None else str(sums.kernels)
    time = "" if sums.device_time_us is None else formats.number_of_us(sums.device_time_us.exact)
    time = time or unmeasured_time(result.row)
    return kernels, formats.size(sums.declared.exact), formats.share(sums.fusion_efficiency, 1), time


def _records(source: Source, shown: Shown) -> Iterator[RenderableType]:
    from ..graph.render import text_view

    if not source.results:
        yield text_view.plain("no records")
    for result in source.results:
        record = result.record
        assert record is not None
        status = record.status + (f", for {record.target}" if record.target else "")
        notes = [f"{status}: {record.detail}" if record.detail else status]
        for phase, made in record.kernels.items():
            if made.unjoined:
                notes.append(f"{phase}: ran on the device without a kernel in this graph: {', '.join(made.unjoined)}")
        if result.graph is not None:
            yield _tree(result, shown, record.id, notes)
            continue
        missing = "no graph recorded" if result.read is None else "its graph cannot be read"
        files = f"; its compiler's files: {result.path / record.dumps}" if record.dumps else ""
        yield text_view.titled(record.id, [*notes, missing + files])


def _tree(result: Result, shown: Shown, title: str | None = None, notes: Sequence[str] = ()) -> RenderableType:
    from ..graph.render import text_view

    graph = predicted_for(result, shown)
    ceilings, _ = result.priced_for(shown.price_as)
    known: dict[str, Any] = {}
    name = None
    if result.record is not None:  # the block's declared bytes and FLOPs are exact; a graph's are derived
        name = result.name
        known = {
            "bytes_compulsory": result.record.bytes_compulsory or None, "flops_declared": result.record.flops or None,
            "call_us": paired_rounds.device_time_us(result.record),
        }
    lines = [*notes, *text_view.totals_lines(graph, ceilings, **known)]
    remarks = text_view.finding_lines(graph, ceilings, name=name)
    return text_view.overview(graph, width=shown.width, every=shown.every, title=title, notes=lines, remarks=remarks)


def with_graphs(source: Source) -> list[Result]:
    """Return the results whose graph can be read. Raises UsageError where none can, and where modules are too many."""
    require_graphs(source)
    if source.run is None:
        if source.kind == "dump" and len(source.results) > SHOWN_AT_ONCE:
            raise UsageError(
                f"{source.path}: holds {len(source.results)} modules; choose one: --module NAME or NUMBER"
            )
        for result in source.results:
            result.load()
        return list(source.results)
    readable = [result for result in source.results if result.graph is not None]
    if not readable:
        none = f"none of {len(source.results)} records has a graph that can be read"
        raise UsageError(f"{source.path}: {none}{source.unreadable_example}")
    return readable


def require_graphs(source: Source) -> None:
    if source.kind == "profile" and not source.results:
        raise UsageError(
            f"{source.path}: no compiler's files belong to this profile, so it has no graphs; name them with --dump"
        )


def _kernels_named(source: Source, wanted: str, shown: Shown) -> Outline:
    """Show one kernel, with its operations and buffers and their other users; or the kernels of a stage."""
    from ..graph import store
    from ..graph.formats import kernels_named, known_names
    from ..graph.render import text_view
    from ..predict.times import why_predicted

    graphs = [(result, named_graph(result)) for result in with_graphs(source)]
    found = [(result, indices) for result, graph in graphs if (indices := kernels_named(graph, wanted))]
    own_prices = shown.price_as is None
    named = [
        (result, graph, index) for result, indices in found
        for graph in [named_graph(result, predicted=own_prices)] for index in indices
    ]
    of_stage = [] if named else [
        (graph, indices) for _, graph in graphs if (indices := [
            index for index, kernel in enumerate(graph.kernels or ())
            if any(in_stage(stage, wanted) for stage in kernel.stages)
        ])
    ]
    if of_stage and shown.price_as is not None:
        raise UsageError(f"--price-as has no prices for the kernels of a stage, {printable(wanted, 60)}")
    if not named and not of_stage:
        kernels = [kernel for _, graph in graphs for kernel in graph.kernels or ()]
        known = [name for _, graph in graphs for name in known_names(graph)]
        stages = dict.fromkeys(stage for kernel in kernels for stage in kernel.stages)
        names = dict.fromkeys(kernel.name for kernel in kernels)
        one_of("kernel", wanted, [*known, *stages], names, most=MOST_NAMED)

    def document() -> dict[str, Any]:
        places = [*((graph, [index]) for _, graph, index in named), *of_stage]
        entries = [(graph.name, store.to_json(graph)["kernels"][i]) for graph, indices in places for i in indices]
        return {"schema": "xlafuse.kernels/1", "kernels": [{"graph": name, **kernel} for name, kernel in entries]}

    def trees() -> Iterator[RenderableType]:
        for result, graph, index in named:
            yield text_view.kernel(
                graph, index, width=shown.width, ceilings=result.priced_for(shown.price_as)[0],
                why=why_predicted(graph, index, result.ceilings, result.ran_on) if own_prices else (),
            )
        for graph, indices in of_stage:
            yield text_view.stage(graph, wanted, indices, width=shown.width, every=shown.every)

    return Outline(document, trees)


def in_stage(stage: str, wanted: str) -> bool:
    """Return True where `wanted` is a run of whole scopes in the stage's path: "norm" in "layer/norm/scale"."""
    return f"/{wanted.strip('/')}/" in f"/{stage}/"


def named_graph(result: Result, *, predicted: bool = False) -> FusionGraph:
    """Return the graph; a record's has the record's id as its name. predicted: add predicted times."""
    graph = result.load()
    graph = (result.predicted_graph if predicted else None) or graph
    return graph if result.record is None else replace(graph, name=result.id)


def predicted_for(result: Result, shown: Shown) -> FusionGraph:
    """Return the graph, with predicted times where none was measured and no other GPU's rates are asked for."""
    graph = result.load()
    return graph if shown.price_as is not None else result.timed_graph or graph


def why(source: Source, shown: Shown) -> Outline:
    """Missed fusions and the reasons against them, most costly first."""
    from ..graph.analyse import missed_fusions
    from ..graph.render import missed_view, text_view

    priced = [
        (named_graph(result, predicted=shown.price_as is None), *result.priced_for(shown.price_as))
        for result in with_graphs(source)
    ]

    def trees() -> Iterator[RenderableType]:
        for graph, ceilings, whose in priced:
            yield missed_view.tree(graph, ceilings, whose, every=shown.every)
        prices = (one.price for graph, ceilings, _ in priced for one in missed_fusions.ranked(graph, ceilings))
        if error := missed_fusions.price_error(prices):
            yield text_view.plain(f"times: {error}")

    return Outline(
        lambda: {"schema": "xlafuse.why/1", "graphs": [missed_view.to_json(*graph) for graph in priced]}, trees
    )


def stages(source: Source, shown: Shown) -> Outline:
    """Graphs side by side by the stages of the program."""
    from ..graph.analyse.align import align
    from ..graph.render import align_view, text_view

    cases = _cases_side_by_side(source)

    def document() -> dict[str, Any]:
        entries = [(case.id, _graphs_of(case, shown)) for case in cases]
        return {"schema": "xlafuse.stages/1", "cases": [
            {"case": id, **align_view.to_json(list(graphs), align(list(graphs.values())))} for id, graphs in entries
        ]}

    def trees() -> Iterator[RenderableType]:
        for case in cases:
            if source.run is not None or len(cases) > 1:
                yield text_view.plain(printable(case.id), "bold")
            yield from _side_by_side(case, shown)
            if len(cases) > 1:
                yield text_view.plain("")

    return Outline(document, trees)


def _cases_side_by_side(source: Source) -> list[CaseResults]:
    """Return the cases that have several graphs. Raises UsageError where none has."""
    if source.kind == "dump" and 1 < len(source.results) <= SHOWN_AT_ONCE:  # chosen by --module
        alone = [replace(source, results=(result,)) for result in source.results]
        return list(aligned.side_by_side(alone).cases)
    cases = [case for case in source.cases if sum(r.graph is not None for r in case.results) > 1]
    if not cases:
        raise UsageError(f"{source.path}: no case has several graphs to show side by side{source.unreadable_example}")
    return cases


def _graphs_of(case: CaseResults, shown: Shown) -> dict[str, FusionGraph]:
    return {result.name: predicted_for(result, shown) for result in case.results if result.graph is not None}


def _side_by_side(case: CaseResults, shown: Shown) -> Iterator[RenderableType]:
    """Yield the table of stages, the gain of fusion in a run's case, and the findings.

    Without --price-as, graphs for different targets have no prices.
    """
    from ..graph.analyse.ablation import ablation
    from ..graph.analyse.align import align
    from ..graph.findings.collect import findings
    from ..graph.render import align_view, text_view

    graphs = _graphs_of(case, shown)
    yield align_view.table(list(graphs), list(graphs.values()), align(list(graphs.values())))
    for fused, unfused in UNFUSED.items():
        pair = [graphs[name] for name in (fused, unfused) if name in graphs]
        if len(pair) == 2 and all(graph.kernels is not None for graph in pair):
            yield text_view.plain("")
            yield align_view.ablation(fused, unfused, ablation(*pair))
    one_device = shown.price_as is not None or len({graph.target for graph in graphs.values()}) == 1
    first = next(result for result in case.results if result.graph is not None)
    ceilings = first.priced_for(shown.price_as)[0] if one_device else None
    if sentences := findings(graphs, ceilings):
        yield text_view.plain("")
        yield text_view.titled("what stands out", map(str, sentences if shown.every else sentences[:MOST_FINDINGS]))


def passes(source: Source, shown: Shown) -> Outline:
    """The changes of each of XLA's passes, where the dump has them."""
    from xlafuse.reasons.pass_changes import read_pass_changes

    from ..graph.render import text_view

    compiled = [(result, result.compiled()) for result in with_graphs(source)]
    without = [printable(result.id, 60) for result, modules in compiled if not modules]
    if len(without) == len(compiled):
        raise UsageError(
            f"{source.path}: no XLA dump of {join_some(without, MOST_NAMED)}; --view passes needs one: a dump folder, "
            "an archive of it, or a run's record that XLA compiled"
        )
    changes = []
    for result, modules in compiled:
        for name, artifacts in modules:
            with reading_errors_as_usage(result.path):
                changes.append((name, read_pass_changes(artifacts)))

    def trees() -> Iterator[RenderableType]:
        nothing = ["no snapshots between passes; XLA writes them with --xla_dump_hlo_pass_re=.*"]
        for name, made in changes:
            yield text_view.titled(name, [str(change) for change in made] or nothing)
        if without:
            yield text_view.plain(f"no XLA dump: {join_some(without, MOST_NAMED)}")

    return Outline(
        lambda: {
            "schema": "xlafuse.passes/1",
            "modules": [
                {"module": name, "passes": [{**asdict(change), "text": str(change)} for change in made]}
                for name, made in changes
            ],
        },
        trees,
    )


def steps(source: Source, shown: Shown) -> Outline:
    """The parts of the model by their time in a median step, then the kernels, with the gaps between them."""
    from .first_screen import first_screen
    from .profile_view import ProfileView

    if source.profile is None:
        raise UsageError(f"{source.path}: no profile, so it has no steps")
    view = ProfileView(source.profile, source.profile.ceilings(shown.price_as))

    def document() -> dict[str, Any]:
        screen = first_screen(source)
        return {**view.to_json(), "step": None if screen is None else screen.to_json()}

    def trees() -> Iterator[RenderableType]:
        if (screen := first_screen(source)) is not None:
            yield from screen.terminal(every=shown.every)
        yield view.text(width=shown.width, every=shown.every)

    return Outline(document, trees)
