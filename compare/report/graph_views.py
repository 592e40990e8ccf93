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
from . import aligned, run_graphs
from .outline import Outline

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ..graph.model import FusionGraph

MOST_TREES = 12  # a run with more records is listed, one line each, unless the user selected records
MOST_LISTED = 50
MOST_NAMED = 12


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
    _require_graphs(source)
    many = MOST_TREES if source.run is not None else SHOWN_AT_ONCE
    listed = len(source.results) > many and not shown.selected and (source.kind == "dump" or not shown.every)
    if listed and shown.price_as is not None:
        raise UsageError(f"{source.path}: a list of {len(source.results)} graphs has no prices for --price-as")
    if source.run is not None:
        return Outline(
            lambda: {"schema": "xlafuse.records/1", "records": [_record_json(result) for result in source.results]},
            lambda: [run_graphs.table(source.results)] if listed and source.kind == "run" else _records(source, shown),
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
        return store.to_json(graphs[0])
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
        grid.add_row(*map(text_view.plain, ("number", "module", *(["XLA's id"] if of_xla else []), "size")))
        kept = results if shown.every else results[:MOST_LISTED]
        for result in kept:
            order = [str(result.order)] if of_xla else []
            cells = (str(result.number), formats.name(result.id), *order, formats.size(result.cost))
            grid.add_row(*map(text_view.plain, cells))
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

    record = result.record
    assert record is not None
    case = record.case
    return {
        "id": record.id, "block": case.block, "case": case.name, "direction": case.direction, "dtype": case.dtype,
        "precision": case.precision, "implementation": record.implementation, "status": record.status,
        "detail": record.detail, "segment": record.segment, "target": record.target, "dumps": record.dumps,
        "kernels": to_builtins(record.kernels), "graph": None if result.graph is None else store.to_json(result.graph),
    }


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

    graph = result.load()
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
    _require_graphs(source)
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


def _require_graphs(source: Source) -> None:
    if source.kind == "profile" and not source.results:
        raise UsageError(
            f"{source.path}: no compiler's files belong to this profile, so it has no graphs; name them with --dump"
        )


def _kernels_named(source: Source, wanted: str, shown: Shown) -> Outline:
    """Show one kernel: its operations and buffers, and their other users."""
    from ..graph import store
    from ..graph.formats import kernels_named, known_names
    from ..graph.render import text_view

    graphs = [(result, named_graph(result)) for result in with_graphs(source)]
    named = [(result, graph, index) for result, graph in graphs for index in kernels_named(graph, wanted)]
    if not named and (of_stage := _kernels_of_stage([graph for _, graph in graphs], wanted)):
        if shown.price_as is not None:
            raise UsageError(f"--price-as has no prices for the kernels of a stage, {printable(wanted, 60)}")
        return _stage(of_stage, wanted, shown)
    if not named:
        kernels = [kernel for _, graph in graphs for kernel in graph.kernels or ()]
        known = [name for _, graph in graphs for name in known_names(graph)]
        stages = dict.fromkeys(stage for kernel in kernels for stage in kernel.stages)
        names = dict.fromkeys(kernel.name for kernel in kernels)
        one_of("kernel", wanted, [*known, *stages], names, most=MOST_NAMED)
    return Outline(
        lambda: {
            "schema": "xlafuse.kernels/1",
            "kernels": [{"graph": g.name, **store.to_json(g)["kernels"][index]} for _, g, index in named],
        },
        lambda: (
            text_view.kernel(graph, index, width=shown.width, ceilings=result.priced_for(shown.price_as)[0])
            for result, graph, index in named
        ),
    )


def _kernels_of_stage(graphs: Sequence[FusionGraph], wanted: str) -> list[tuple[FusionGraph, list[int]]]:
    """Return the graphs that have kernels with operations of a stage, and the places of these kernels."""
    places = [
        (graph, [
            index for index, kernel in enumerate(graph.kernels or ())
            if any(in_stage(stage, wanted) for stage in kernel.stages)
        ])
        for graph in graphs
    ]
    return [(graph, indices) for graph, indices in places if indices]


def in_stage(stage: str, wanted: str) -> bool:
    """Return True where `wanted` is a run of whole scopes in the stage's path: "norm" in "layer/norm/scale"."""
    return f"/{wanted.strip('/')}/" in f"/{stage}/"


def _stage(places: Sequence[tuple[FusionGraph, list[int]]], wanted: str, shown: Shown) -> Outline:
    from ..graph import store
    from ..graph.render import text_view

    return Outline(
        lambda: {
            "schema": "xlafuse.kernels/1",
            "kernels": [
                {"graph": graph.name, **store.to_json(graph)["kernels"][index]}
                for graph, indices in places for index in indices
            ],
        },
        lambda: (
            text_view.stage(graph, wanted, indices, width=shown.width, every=shown.every) for graph, indices in places
        ),
    )


def named_graph(result: Result) -> FusionGraph:
    """Return the graph; a record's has the record's id as its name."""
    return result.load() if result.record is None else replace(result.load(), name=result.id)


def why(source: Source, shown: Shown) -> Outline:
    """Missed fusions and the reasons against them, most costly first."""
    from ..graph.analyse import missed_fusions
    from ..graph.render import missed_view, text_view

    priced = [(named_graph(result), *result.priced_for(shown.price_as)) for result in with_graphs(source)]

    def trees() -> Iterator[RenderableType]:
        for graph, ceilings, whose in priced:
            yield missed_view.tree(graph, ceilings, whose, every=shown.every)
        has_prices = any(ceilings and missed_fusions.ranked(graph, ceilings) for graph, ceilings, _ in priced)
        if has_prices:
            yield text_view.plain(f"times: {missed_fusions.PRICE_ERROR}")

    return Outline(
        lambda: {"schema": "xlafuse.why/1", "graphs": [missed_view.to_json(*graph) for graph in priced]}, trees
    )


def stages(source: Source, shown: Shown) -> Outline:
    """Graphs side by side by the stages of the program."""
    from ..graph.render import text_view

    cases = _cases_side_by_side(source)

    def trees() -> Iterator[RenderableType]:
        for case in cases:
            if source.run is not None or len(cases) > 1:
                yield text_view.plain(printable(case.id), "bold")
            yield from aligned.views(case, target=shown.price_as, every=shown.every)
            if len(cases) > 1:
                yield text_view.plain("")

    return Outline(
        lambda: {
            "schema": "xlafuse.stages/1", "cases": [{"case": case.id, **aligned.to_json(case)} for case in cases],
        },
        trees,
    )


def _cases_side_by_side(source: Source) -> list[CaseResults]:
    if source.kind == "dump" and 1 < len(source.results) <= SHOWN_AT_ONCE:  # chosen by --module
        alone = [replace(source, results=(result,)) for result in source.results]
        return list(aligned.side_by_side(alone).cases)
    return aligned.with_several_graphs(source)


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
    """The kernels of a profile by their time in a median step, with its gaps."""
    from .profile_view import ProfileView

    if source.profile is None:
        raise UsageError(f"{source.path}: no profile, so it has no steps")
    view = ProfileView(source.profile, source.profile.ceilings(shown.price_as))
    return Outline(view.to_json, lambda: [view.text(width=shown.width, every=shown.every)])
