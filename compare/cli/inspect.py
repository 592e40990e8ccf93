"""`xlafuse inspect`: show the kernels of a run, a folder of dumps or a file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..base.text import printable
from ..base.usage import UsageError, join_some, one_of, write_file
from ..plan import paired_rounds
from ..report import aligned
from ..sources.graph_sources import (
    SHOWN_AT_ONCE,
    Contents,
    GraphSource,
    contents,
    has_profile,
    reading_errors_as_usage,
)
from .options import json_option, record_filters
from .terminal import echo_json, emit, warn, width

if TYPE_CHECKING:
    from ..graph.analyse.roofline import Ceilings
    from ..graph.model import FusionGraph
    from ..sources.profile_sources import OpenedProfile

MOST_TREES = 12  # a run with more records is listed, one line each, unless the user selected records
MOST_LISTED = 50
MOST_NAMED = 12


@dataclass(frozen=True)
class ViewOptions:
    """The view of each graph. None and False: the default view."""

    kernel: str | None = None
    stage: str | None = None
    why: bool = False
    dot: bool = False
    model_explorer: Path | None = None
    passes: bool = False
    every: bool = False
    as_json: bool = False
    target: str | None = None
    html: Path | None = None

    def views(self) -> list[str]:
        views = {"--kernel": self.kernel, "--stage": self.stage, "--why": self.why, "--dot": self.dot,
                 "--model-explorer": self.model_explorer, "--passes": self.passes}
        return [option for option, value in views.items() if value]


@click.command("inspect")
@click.argument("paths", nargs=-1, type=click.Path(path_type=Path), metavar="PATH [PATH]")
@record_filters("For a run: ")
@click.option("--module", metavar="NAME|NUMBER", help="For a folder of dumps: this module.")
@click.option("--rank", type=click.IntRange(min=0), help="One of several ranks, or GPUs of a profile. Default: lowest.")
@click.option("--kernel", metavar="NAME|NUMBER", help="One kernel: its operations and buffers, and their other users.")
@click.option("--stage", metavar="NAME", help="Only kernels with operations of this stage of the program.")
@click.option("--why", is_flag=True, help="Show missed fusions and the reasons against them, most costly first.")
@click.option(
    "--align", nargs=2, metavar="A B",
    help="Show implementations of a run, or two paths, by the program's stages. B may name several: inductor,triton. "
    "With two runs, A is of the first and B of the second.",
)
@click.option("--passes", is_flag=True, help="Show the changes of each of XLA's passes, where the dump has them.")
@click.option("--dot", is_flag=True, help="Print Graphviz text.")
@click.option(
    "--model-explorer", type=click.Path(path_type=Path), metavar="FILE",
    help="Write JSON for Google's Model Explorer to FILE.",
)
@click.option(
    "--all", "every", is_flag=True, help="Show all kernels, modules and reasons, not only the costly ones of many."
)
@click.option(
    "--target", metavar="NAME", help="Price bytes by this GPU's bandwidth. Default: the GPU of the run or the compile."
)
@click.option(
    "--dump", type=click.Path(path_type=Path), metavar="PATH",
    help="For a profile: the compilers' files of its programs, if they are not beside it.",
)
@click.option(
    "--html", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
    help="Write graphs side by side to FILE as a page for a browser.",
)
@click.option("--strict", is_flag=True, help="Exit with 1 where a part of a selected graph could not be read.")
@json_option
@click.pass_context
def command(
    context: click.Context, paths: tuple[Path, ...], filters: Mapping[str, list[str]], module: str | None,
    rank: int | None, align: tuple[str, str] | None, dump: Path | None, strict: bool, **options: Any,
) -> None:
    """Show the kernels that a compiler made and their operations.

    PATH is a run's folder; a folder or archive of dumps (XLA's, Inductor's, a record's); or one file: HLO, Inductor's
    output code, or a fusion graph's JSON. It may also be a profile of jax.profiler, torch.profiler or Nsight Systems
    (SQLite), or a folder of `xlafuse capture`: kernels are shown with the times of its steps.

    Kernels are listed in the order they run, those of a profile by their time. Each shows its operations with their
    source lines, the bytes that it moves and, where it was measured, its time. Two paths are shown side by side; of two
    runs, the cases and implementations that both have.

    \b
      xlafuse inspect runs/mine --block softmax -i xla,inductor
      xlafuse inspect runs/mine --block softmax --align xla inductor
      xlafuse inspect runs/tpu runs/gpu -i xla --html both.html
      xlafuse inspect /tmp/xla_dump --module jit_step --why
      xlafuse inspect module.hlo.pb --json
      xlafuse inspect trace.json.gz --dump /tmp/torch_trace

    Exit code: 0, 1 with --strict where a part could not be read, 2 where nothing could be read or options are wrong.
    """
    selected = inspect(
        paths, ViewOptions(**options), module=module, rank=rank, align=align, filters=filters, dump=dump
    )
    context.exit(1 if strict and not all(map(_is_complete, selected)) else 0)


def inspect(
    paths: Sequence[Path], options: ViewOptions, *, module: str | None, align: tuple[str, str] | None,
    filters: Mapping[str, list[str]], rank: int | None = None, dump: Path | None = None,
) -> list[GraphSource]:
    """Print the graphs of the paths; return their sources. filters: fields of a run's records -> names.

    rank: of every path. dump: the compilers' files of a profile.

    Raises UsageError and RunFolderError.
    """
    views = options.views()
    if len(views) > 1:
        raise UsageError(f"{' and '.join(views)} are different views; choose one")
    if options.dot and options.as_json:
        raise UsageError("--dot prints Graphviz text; it does not go with --json")
    if options.model_explorer and options.as_json:
        raise UsageError("--model-explorer writes its own JSON; it does not go with --json")
    if align and not paths:
        paths, align = [Path(align[0]), Path(align[1])], None
    if not paths:
        raise UsageError("nothing to inspect; name a run folder, a folder or archive of dumps, or one file")
    if options.html is not None:
        _check_html(paths, options, side_by_side=align is not None or len(paths) > 1)
    if (align or len(paths) > 1) and views:
        raise UsageError(f"{views[0]} shows one graph at a time; it does not go with several side by side")
    _check_all_and_target(options, views)
    if len(paths) == 1 and has_profile(paths[0]):
        from ..sources.profile_sources import UnreadableCapture, open_profile

        try:
            profile = open_profile(paths[0], dump, rank)
        except UnreadableCapture as problem:  # its compilers' files may be there
            if dump is not None:
                raise UsageError(f"{problem}; without --dump, its own compilers' files are shown") from None
            warn([str(problem)])
        else:
            if align:
                raise UsageError(f"--align goes with a run, a folder of dumps, or two runs; {paths[0]} is a profile")
            _refuse_filters(filters, f"{paths[0]} is a profile")
            return _show_profile(profile, options, module)
    elif dump is not None:
        raise UsageError(f"{paths[0]}: --dump goes with one profile, and this is none")
    opened = [contents(path, rank) for path in paths]
    for each in opened:
        warn(each.warnings)
    if len(paths) == 2 and all(each.kind == "run" for each in opened):
        selected = [_select(each, module, filters) for each in opened]
        _show_cases(aligned.of_two_runs(opened, selected, align), options)
        return [source for sources in selected for source in sources]
    if len(paths) > 1:
        _refuse_filters(filters, "leave the other path out")
        if align:
            raise UsageError("--align with two paths goes with two runs; these are shown side by side without it")
        sources = [each.module(module) for each in opened]
        _show_aligned(sources, options)
        return sources
    (only,) = opened
    sources = _select(only, module, filters)
    if align and module is not None:
        raise UsageError("--align names the modules itself; --module goes with one module alone, or with two paths")
    if align:
        _show_choice(only, sources, align, options)
    elif only.kind == "dump" and module is None and len(sources) > SHOWN_AT_ONCE:
        if views:
            raise UsageError(f"{only.path}: holds {len(sources)} modules; {views[0]} needs --module NAME or NUMBER")
        _refuse_target(options, f"{only.path} holds {len(sources)} modules: choose one with --module")
        _list_modules(sources, options)
    elif only.kind == "run":
        if len(sources) > MOST_TREES and not (views or options.as_json or options.every or any(filters.values())):
            _refuse_target(options, f"{only.path} has {len(sources)} records: select some with --block or -i")
            _list_records(sources)
        else:
            _show_records(sources, options)
    else:
        _show_graphs(sources, options)
    return sources


def _check_all_and_target(options: ViewOptions, views: Sequence[str]) -> None:
    """Refuse --all and --target where they would change nothing."""
    view = views[0] if views else ""
    if options.every and (options.as_json or options.html or view not in ("", "--why", "--stage")):
        raise UsageError("--all lengthens lists in a terminal: kernels, modules, --why, --stage; other forms are whole")
    if view not in ("", "--why", "--kernel"):
        _refuse_target(options, f"{view} has no prices")
    if options.as_json and view == "--kernel":
        _refuse_target(options, "its JSON has no prices")


def _refuse_target(options: ViewOptions, reason: str) -> None:
    if options.target is not None:
        raise UsageError(
            f"--target prices bytes in the lists of kernels, in --kernel and --why, and side by side; {reason}"
        )


def _refuse_filters(filters: Mapping[str, list[str]], reason: str) -> None:
    if any(filters.values()):
        raise UsageError(f"--block, --case, --direction and -i select records of runs; {reason}")


def _check_html(paths: Sequence[Path], options: ViewOptions, *, side_by_side: bool) -> None:
    if not side_by_side:
        raise UsageError(f"--html is for graphs side by side; `xlafuse report {paths[0]} --html FILE` shows one path")
    if options.as_json or options.target is not None:
        other = "--json" if options.as_json else "--target"
        raise UsageError(f"--html prices each graph by its own device and prints no JSON; leave {other} out")


def _show_profile(opened: OpenedProfile, options: ViewOptions, module: str | None) -> list[GraphSource]:
    """Show a profile's kernels, or a view of the graphs that it is joined to, with the times of a median step."""
    from ..report.profile_view import ProfileView

    sources = opened.graph_sources(module)
    if options.views() and not sources:
        raise UsageError(
            f"{opened.path}: no compiler's files belong to this profile, so it has no graphs for {options.views()[0]}; "
            "name them with --dump"
        )
    if module is not None or options.views():
        _show_graphs(sources, options)
        return sources
    view = ProfileView(opened, opened.ceilings(options.target))
    if options.as_json:
        echo_json(view.to_json())
    else:
        emit(view.text(width=width(), every=options.every))
    return sources


def _is_complete(source: GraphSource) -> bool:
    """Return whether the graph can be read without remainder. A record without a graph is complete."""
    try:
        return source.read is None or not source.graph().unparsed
    except UsageError:
        return False


def _select(opened: Contents, module: str | None, filters: Mapping[str, list[str]]) -> list[GraphSource]:
    if opened.kind == "run":
        if module is not None:
            raise UsageError("--module selects in a folder of dumps; for a run use --block, --case, --direction and -i")
        return _records(opened, filters)
    if any(filters.values()):
        raise UsageError(f"{opened.path}: no run folder, and --block, --case, --direction and -i select in runs only")
    return list(opened.graphs) if module is None else opened.modules(module)


def _records(opened: Contents, filters: Mapping[str, list[str]]) -> list[GraphSource]:
    from ..report.rows import only

    rows = [
        {"number": each.number, "block": each.record.case.block, "case": each.record.case.name,
         "direction": each.record.case.direction, "implementation": each.record.implementation}
        for each in opened.graphs if each.record is not None
    ]
    kept = {row["number"] for row in only(rows, **filters)}
    return [each for each in opened.graphs if each.number in kept]


# Several graphs side by side.


def _show_aligned(sources: Sequence[GraphSource], options: ViewOptions) -> None:
    """Show graphs of any origin by one list of stages."""
    found = aligned.labelled(sources)
    if options.html is not None:
        _write_page({" and ".join(found.graphs): found}, options.html)
        return
    if options.as_json:
        _refuse_target(options, "the JSON of graphs side by side has no prices")
        echo_json(found.to_json())
        return
    for view in found.views(target=options.target, every=options.every):
        emit(view)


def _show_choice(opened: Contents, sources: list[GraphSource], align: Sequence[str], options: ViewOptions) -> None:
    """Show modules of a folder of dumps, or each case of a run with the named implementations, side by side."""
    if opened.kind != "run":
        _show_aligned([opened.module(name) for name in align], options)
        return
    _show_cases(aligned.by_case(opened, sources, align), options)


def _show_cases(cases: Mapping[str, aligned.SideBySide], options: ViewOptions) -> None:
    """Show each case of runs with its graphs side by side."""
    from ..graph.render import text_view

    if options.html is not None:
        _write_page(cases, options.html)
        return
    if options.as_json:
        _refuse_target(options, "the JSON of graphs side by side has no prices")
        echo_json([{"case": case, **found.to_json()} for case, found in cases.items()])
        return
    for case, found in cases.items():
        emit(text_view.plain(printable(case), "bold"))
        for view in found.views(target=options.target, every=options.every, ablations=True):
            emit(view)
        emit(text_view.plain(""))


def _write_page(cases: Mapping[str, aligned.SideBySide], out: Path) -> None:
    from ..graph import formats
    from ..report.page import page

    names = dict.fromkeys(source.path.resolve().name for found in cases.values() for source in found.sources)
    page.write_side_by_side(" and ".join(names), cases, out)
    click.echo(f"{out}: {formats.count(len(cases), 'case')} side by side; open it in a browser")


# One graph after the other.

Pairs = list[tuple[GraphSource, "FusionGraph"]]


def _list_modules(sources: list[GraphSource], options: ViewOptions) -> None:
    from ..graph import formats
    from ..graph.render import text_view

    if options.as_json:
        echo_json([{"number": e.number, "name": e.name, "id": e.order, "cost": e.cost} for e in sources])
        return
    of_xla = any(each.order for each in sources)  # folders of graphs or of archives have no module numbers of XLA's
    grid = text_view.columns(6, None, *([9] if of_xla else []), 12, right=(0, 2, 3))
    grid.add_row(*map(text_view.plain, ("number", "module", *(["XLA's id"] if of_xla else []), "size")))
    shown = sources if options.every else sources[:MOST_LISTED]
    for each in shown:
        order = [str(each.order)] if of_xla else []
        cells = (str(each.number), formats.name(each.name), *order, formats.size(each.cost))
        grid.add_row(*map(text_view.plain, cells))
    emit(grid)
    if len(shown) < len(sources):
        emit(text_view.plain(f"… and {len(sources) - len(shown):,} more; --all lists them"))
    emit(text_view.plain(f"{formats.count(len(sources), 'module')}; --module NUMBER or NAME shows one"))


def _show_graphs(sources: Sequence[GraphSource], options: ViewOptions) -> None:
    from ..graph import store
    from ..sources.explained import Explained

    # In the order of compilation. A record's archive has forward and backward without such numbers.
    pairs = [(each, each.graph()) for each in sorted(sources, key=lambda each: (each.order, each.name == "backward"))]
    if options.as_json and not options.views():
        _refuse_target(options, "a graph's JSON has no prices")
        if len(pairs) == 1:
            echo_json(store.to_json(pairs[0][1]))
        else:
            names = aligned.unique(each.name for each, _ in pairs)
            echo_json(Explained({name: graph for name, (_, graph) in zip(names, pairs, strict=True)}).to_json())
    elif options.views():
        _answer(pairs, options)
    else:
        for each, graph in pairs:
            _show_graph(each, graph, options)


def _list_records(sources: list[GraphSource]) -> None:
    from ..report import run_graphs

    emit(run_graphs.table([(each, _recorded(each)) for each in sources]))


def _show_records(sources: list[GraphSource], options: ViewOptions) -> None:
    from ..graph.render import text_view

    pairs = [(each, _recorded(each)) for each in sources]
    if options.views():
        known = [(each, replace(graph, name=each.name)) for each, graph in pairs if graph is not None]
        if not known:
            raise UsageError(f"none of {len(sources)} records has a graph that can be read")
        _answer(known, options)
    elif options.as_json:
        _refuse_target(options, "a graph's JSON has no prices")
        echo_json([_record_json(each, graph) for each, graph in pairs])
    elif not sources:
        emit(text_view.plain("no records"))
    else:
        for each, graph in pairs:
            _show_record(each, graph, options)


def _recorded(each: GraphSource) -> FusionGraph | None:
    """Return the record's graph, or None with a warning where it cannot be read."""
    if each.read is None:
        return None
    try:
        return each.graph()
    except UsageError as problem:
        warn([f"{each.name}: {problem}"])
        return None


def _record_json(each: GraphSource, graph: FusionGraph | None) -> dict[str, Any]:
    """Return the record's identity with its graph, or null in its place."""
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


def _show_record(each: GraphSource, graph: FusionGraph | None, options: ViewOptions) -> None:
    from ..graph.render import text_view

    record = each.record
    assert record is not None
    status = record.status + (f", for {record.target}" if record.target else "")
    notes = [f"{status}: {record.detail}" if record.detail else status]
    for part, made in record.kernels.items():
        if left := made.get("unjoined"):
            notes.append(f"{part}: ran on the device without a kernel in this graph: {', '.join(map(str, left))}")
    if graph is not None:
        _show_graph(each, graph, options, record.id, notes)
        return
    missing = "no graph recorded" if each.read is None else "its graph cannot be read"
    files = f"; its compiler's files: {each.path / record.dumps}" if record.dumps else ""
    emit(text_view.titled(record.id, [*notes, missing + files]))


def _show_graph(
    each: GraphSource, graph: FusionGraph, options: ViewOptions, title: str | None = None, notes: Sequence[str] = ()
) -> None:
    from ..graph.render import text_view

    ceilings, _ = each.ceilings_for(graph, options.target)
    known: dict[str, Any] = {}
    name = None
    if each.record is not None:  # the block's declared bytes and FLOPs are exact; a graph's are derived
        name = each.record.implementation
        known = {
            "bytes_compulsory": each.record.bytes_compulsory or None, "flops_declared": each.record.flops or None,
            "call_us": paired_rounds.device_time_us(each.record),
        }
    lines = [*notes, *text_view.totals_lines(graph, ceilings, **known)]
    remarks = text_view.finding_lines(graph, ceilings, name=name)
    emit(text_view.overview(graph, width=width(), every=options.every, title=title, notes=lines, remarks=remarks))


def _answer(pairs: Pairs, options: ViewOptions) -> None:
    """Show one view of each graph."""
    if options.dot:
        from ..graph.render.dot import dot

        for _, graph in pairs:
            click.echo(dot(graph), nl=False)
    elif options.model_explorer is not None:
        _write_model_explorer(pairs, options.model_explorer)
    elif options.kernel is not None:
        _show_kernels(pairs, options.kernel, options)
    elif options.stage is not None:
        _show_stage(pairs, options.stage, options)
    elif options.why:
        priced = ((graph, *each.ceilings_for(graph, options.target)) for each, graph in pairs)
        show_missed_fusions(priced, as_json=options.as_json, every=options.every)
    else:
        _show_passes(pairs, options)


def show_missed_fusions(
    graphs: Iterable[tuple[FusionGraph, Ceilings | None, str]], *, as_json: bool, every: bool = False
) -> None:
    """Print each graph's missed fusions, priced by its ceilings. The text names the GPU that they are of."""
    from ..graph.analyse import missed_fusions
    from ..graph.render import missed_view
    from ..report.missed_fusions import price

    priced = [(graph, *price(graph, ceilings, whose)) for graph, ceilings, whose in graphs]
    if as_json:
        echo_json([missed_view.to_json(*each) for each in priced])
    else:
        for each in priced:
            emit(missed_view.tree(*each, every=every))
        has_prices = any(known and missed_fusions.ranked(graph, known) for graph, known, _ in priced)
        if has_prices and missed_fusions.PRICE_ERROR is not None:
            click.echo(f"times: {missed_fusions.PRICE_ERROR}")


def _write_model_explorer(pairs: Pairs, file: Path) -> None:
    from ..graph import formats
    from ..graph.render import model_explorer

    names = aligned.unique(each.name for each, _ in pairs)
    graphs = zip(names, (graph for _, graph in pairs), strict=True)
    write_file(file, json.dumps(model_explorer.collection(pairs[0][0].path.name, graphs)).encode())
    click.echo(f"{file}: {formats.count(len(names), 'graph')}; open it in Model Explorer: model-explorer {file}")


def _show_kernels(pairs: Pairs, wanted: str, options: ViewOptions) -> None:
    from ..graph.kernel_names import kernels_named, known_names
    from ..graph.render import text_view

    found = [(each, graph, index) for each, graph in pairs for index in kernels_named(graph, wanted)]
    if not found:
        shown = dict.fromkeys(kernel.name for _, graph in pairs for kernel in graph.kernels or ())
        one_of("kernel", wanted, [name for _, graph in pairs for name in known_names(graph)], shown, most=MOST_NAMED)
    if options.as_json:
        echo_json([_kernel_json(graph, index) for _, graph, index in found])
        return
    for each, graph, index in found:
        ceilings, _ = each.ceilings_for(graph, options.target)
        emit(text_view.kernel(graph, index, width=width(), ceilings=ceilings))


def _kernel_json(graph: FusionGraph, index: int) -> dict[str, Any]:
    from ..graph import store

    return {"graph": graph.name, **store.to_json(graph)["kernels"][index]}


def _show_stage(pairs: Pairs, wanted: str, options: ViewOptions) -> None:
    from ..graph.render import text_view

    found = []
    for _, graph in pairs:
        kernels = enumerate(graph.kernels or ())
        if indices := [i for i, kernel in kernels if any(in_stage(stage, wanted) for stage in kernel.stages)]:
            found.append((graph, indices))
    if not found:
        stages = list(dict.fromkeys(s for _, graph in pairs for kernel in graph.kernels or () for s in kernel.stages))
        one_of("stage", wanted, stages, most=MOST_NAMED)
    if options.as_json:
        echo_json([_kernel_json(graph, index) for graph, indices in found for index in indices])
        return
    for graph, indices in found:
        emit(text_view.stage(graph, wanted, indices, width=width(), every=options.every))


def in_stage(stage: str, wanted: str) -> bool:
    """Return True where `wanted` is a run of whole scopes in the stage's path: "norm" in "layer/norm/scale"."""
    return f"/{wanted.strip('/')}/" in f"/{stage}/"


def _show_passes(pairs: Pairs, options: ViewOptions) -> None:
    from xlafuse.reasons.pass_changes import read_pass_changes

    from ..graph.render import text_view

    compiled = [(each, each.compiled()) for each, _ in pairs]
    without = [printable(each.name, 60) for each, modules in compiled if not modules]
    others = join_some(without, MOST_NAMED)
    if len(without) == len(pairs):
        raise UsageError(
            f"{pairs[0][0].path}: no XLA dump of {others}; --passes needs one: a dump folder, an archive of it, "
            "or a run's record that XLA compiled"
        )
    answers = []
    for each, name, artifacts in ((each, *module) for each, modules in compiled for module in modules):
        with reading_errors_as_usage(each.path):
            changes = read_pass_changes(artifacts)
        if options.as_json:
            passes = [{**asdict(change), "text": str(change)} for change in changes]
            answers.append({"module": name, "passes": passes})
        else:
            nothing = ["no snapshots between passes; XLA writes them with --xla_dump_hlo_pass_re=.*"]
            emit(text_view.titled(name, [str(change) for change in changes] or nothing))
    if options.as_json:
        echo_json(answers)
    elif without:
        emit(text_view.plain(f"no XLA dump: {others}"))
