"""`xlafuse export`: write what a path holds as a file for another tool."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..base.usage import UsageError, join_some, write_file
from .selection import Selection, selection_options
from .terminal import warn

if TYPE_CHECKING:
    from ..graph.model import FusionGraph
    from ..sources.source import Source

TOOLS = ("perfetto", "xprof", "hlo-opt", "dot", "model-explorer")
MOST_NAMED = 10
Graphs = Sequence[tuple[str, "FusionGraph"]]


@click.command("export")
@click.argument("path", type=click.Path(path_type=Path), metavar="PATH")
@click.option("--to", "tool", type=click.Choice(TOOLS), required=True, help="The tool.")
@click.option(
    "-o", "--out", type=click.Path(path_type=Path), metavar="FILE",
    help="The file to write; for xprof and hlo-opt a new folder. dot prints its text without it.",
)
@selection_options
def command(path: Path, tool: str, out: Path | None, selection: Selection) -> None:
    """Write what a path holds as a file for another tool.

    \b
    perfetto        what host and GPU did in one call of each record of a run on a GPU
    xprof, hlo-opt  the compiler's files of one record of a run
    dot             fusion graphs as Graphviz text
    model-explorer  fusion graphs for Google's Model Explorer

    In the file for Perfetto, each record is a process. It shows the call's phases, the host's launches, and the kernels
    of each stream with their stages, bytes and FLOPs. Arrows join launches to kernels. All records begin at 0 with
    their first launch.

    For XProf and hlo-opt, a new folder gets XLA's files under the names of an --xla_dump_to folder, as hlo-opt takes
    them, and a log folder for XProf. Files of Inductor, Triton and NVRTC keep their names. The output lists what was
    written and what was not kept.

    For graphs, PATH is whatever `xlafuse inspect` reads.

    \b
      xlafuse export runs/mine --to perfetto --block softmax --direction train -i xla,triton -o softmax.json.gz
      xlafuse export runs/mine --to xprof --module softmax/gpt2-scores/bf16/train/xla -o /tmp/softmax
      xlafuse export runs/mine --to model-explorer --block swiglu_mlp -i xla,inductor -o mlp.json
      xlafuse export module.hlo.pb --to dot | dot -Tsvg -o module.svg
    """
    if tool != "dot" and out is None:
        raise UsageError(f"--to {tool} needs -o, the name of what it writes")
    source = selection.open([path])
    warn(source.warnings)
    if tool == "dot":
        _write_dot(_graphs(source), out)
    elif tool == "model-explorer" and out is not None:
        _write_model_explorer(path, _graphs(source), out)
    elif out is not None:
        if source.run is None:
            raise UsageError(f"{path}: no run, and --to {tool} takes records of a run")
        if not source.results:
            raise UsageError(f"{path}: these filters leave no record")
        if tool == "perfetto":
            _write_timelines(source, out)
        else:
            _unpack(source, out)


def _write_timelines(run: Source, out: Path) -> None:
    from ..graph import formats
    from ..user import export_timelines

    records = [result.record for result in run.results if result.record is not None]
    count, warnings = export_timelines.export(run.path, records, out)
    warn(warnings)
    click.echo(f"{out}: {formats.count(count, 'timeline')}; open it in https://ui.perfetto.dev or chrome://tracing")


def _unpack(run: Source, out: Path) -> None:
    from ..user import export_dumps

    if len(run.results) > 1:
        ids = join_some([result.id for result in run.results], MOST_NAMED)
        raise UsageError(f"{run.path}: {len(run.results)} records, and one is needed: --module ID; ids: {ids}")
    record = run.results[0].record
    assert record is not None
    click.echo(export_dumps.as_text(export_dumps.export(run.path, record, out)))


def _graphs(source: Source) -> Graphs:
    """Return the selected graphs by name, in the order of compilation; a record's is called like the record."""
    from ..report.graph_views import in_order, named_graph, with_graphs

    warn(source.unreadable)
    return [(result.id, named_graph(result)) for result in in_order(with_graphs(source))]


def _write_dot(graphs: Graphs, out: Path | None) -> None:
    from ..graph.render.dot import dot

    text = "".join(dot(graph) for _, graph in graphs)
    if out is None:
        click.echo(text, nl=False)
        return
    write_file(out, text.encode())
    click.echo(f"{out}: {_count(graphs)}; dot -Tsvg {out} draws {'it' if len(graphs) == 1 else 'them'}")


def _write_model_explorer(path: Path, graphs: Graphs, out: Path) -> None:
    from ..graph.render import model_explorer
    from ..report.aligned import unique

    names = unique(name for name, _ in graphs)
    collection = model_explorer.collection(path.name, zip(names, (graph for _, graph in graphs), strict=True))
    write_file(out, json.dumps(collection).encode())
    click.echo(f"{out}: {_count(graphs)}; open it in Model Explorer: model-explorer {out}")


def _count(graphs: Graphs) -> str:
    from ..graph import formats

    return formats.count(len(graphs), "graph")
