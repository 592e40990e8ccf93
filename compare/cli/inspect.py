"""`xlafuse inspect`: show what a path holds in the terminal."""

from __future__ import annotations

from pathlib import Path

import click

from ..report.views import WITHOUT_GRAPHS, outline
from .options import json_option
from .selection import Selection, ViewChoice, selection_options, view_options
from .terminal import show, warn


@click.command("inspect")
@click.argument("paths", nargs=-1, type=click.Path(path_type=Path), metavar="PATH [PATH]", required=True)
@view_options
@selection_options
@click.option("--strict", is_flag=True, help="Exit with 1 where a part of a selected graph could not be read.")
@json_option
@click.pass_context
def command(
    context: click.Context, paths: tuple[Path, ...], selection: Selection, choice: ViewChoice, strict: bool,
    as_json: bool,
) -> None:
    """Show the kernels that a compiler made, and what a run measured.

    PATH is a run's folder; a folder or archive of dumps (XLA's, Inductor's, a record's); or one file: HLO, Inductor's
    output code, or a fusion graph's JSON. It may also be a profile of jax.profiler, torch.profiler or Nsight Systems
    (SQLite), or a folder of `xlafuse capture`: kernels are shown with the times of its steps.

    Kernels are listed in the order they run, those of a profile by their time. Each shows its operations with their
    source lines, the bytes that it moves and, where it was measured, its time. Two paths are shown side by side; of two
    runs, the records that both have.

    \b
      xlafuse inspect runs/mine --view times
      xlafuse inspect runs/mine --block softmax -i xla,inductor
      xlafuse inspect runs/mine --block softmax -i xla,inductor --view stages
      xlafuse inspect /tmp/xla_dump --module jit_step --why
      xlafuse inspect module.hlo.pb --json
      xlafuse inspect trace.json.gz --dump /tmp/torch_trace

    Exit code: 0, 1 with --strict where a part could not be read, 2 where nothing could be read or options are wrong.
    """
    source = selection.open(paths)
    view = choice.view_of(source, selected=selection.module is not None, as_json=as_json)
    shown = outline(view, source, choice.shown(selected=selection.selected))
    if view != "steps":  # which has the same notes
        warn(source.warnings)
    show(shown, as_json=as_json)
    if view not in WITHOUT_GRAPHS or as_json:
        warn(source.unreadable)
    if strict and not all(r.read is None or (r.graph and not r.graph.unparsed) for r in source.results):
        context.exit(1)
