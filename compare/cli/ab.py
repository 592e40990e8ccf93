"""`xlafuse ab`: compile one function with several settings, and show what each changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..base.usage import UsageError
from .functions import NotCompiled, arguments, call_of, call_options, check, quiet_jax, resolve, save
from .options import json_option
from .terminal import echo_json, emit

if TYPE_CHECKING:
    from ..graph.analyse.diff import GraphDiff
    from ..user.ab import Comparison

_NOT_TIMED = "nothing was timed. Without a GPU, a setting that lets the compiler measure candidates changes no choice"


@click.command("ab")
@click.argument("function", metavar="FUNCTION")
@click.option(
    "--xla-flag", "xla_flags", multiple=True, metavar="NAME=VALUE[,NAME=VALUE]",
    help="A variant: flags of XLA, for a JAX function. Repeat it for more variants.",
)
@click.option(
    "--inductor", multiple=True, metavar="NAME=VALUE[,NAME=VALUE]",
    help="A variant: options of torch._inductor.config, for a PyTorch function. Repeat it for more variants.",
)
@call_options
@json_option
@click.option("--out", type=click.Path(path_type=Path), metavar="FILE", help="Save the graphs as JSON; .gz compresses.")
def command(
    function: str, xla_flags: Sequence[str], inductor: Sequence[str], inputs: str | None, shapes: str | None,
    grad: bool, target: str | None, framework: str | None, timeout: float, as_json: bool, out: Path | None,
) -> None:
    """Show what a compiler's settings change for your function.

    FUNCTION is named as for `explain`. It is compiled as it is, and once for each variant. Each variant's kernels are
    compared with those of the first compile. On a GPU all are timed in turns, from a cold L2 cache, and a verdict says
    whether the difference holds.

    \b
      xlafuse ab layers.py:mlp --args 'bf16[512,4096], bf16[4096,16384]' \\
        --xla-flag xla_gpu_enable_triton_gemm=false --xla-flag xla_gpu_autotune_level=0
      xlafuse ab layers.py:norm --inputs layers.py:make_inputs --inductor coordinate_descent_tuning=1

    Exit code: 0 when it was compiled, 1 when it could not be, 2 when names or options are wrong.
    """
    from ..plan.selection import resolve_target
    from ..user import ab
    from ..user.explain import ExplainError

    variants = ab.parse_variants(xla_flags, inductor)
    if framework is not None and framework != variants[0].framework:
        raise UsageError(f"--framework {framework} does not fit settings of {variants[0].framework}'s compiler")
    resolve_target(target)
    quiet_jax()
    check(function, inputs=inputs, shapes=shapes)
    resolved = resolve(function)
    args, kwargs = arguments(inputs, shapes)
    try:
        found = ab.compare(
            resolved, args, kwargs, variants, grad=grad, target=target, timeout=timeout,
            progress=lambda message: click.echo(message, err=True), again=partial(call_of, function, inputs, shapes),
        )
    except ExplainError as problem:
        raise NotCompiled(" ".join(str(problem).split())) from None
    save(found.explained, out)
    if as_json:
        echo_json(_to_json(found))
    else:
        _show(found)


def _show(found: Comparison) -> None:
    from ..graph.render import diff_view, text_view
    from ..user.ab import DEFAULT

    graphs = found.explained.graphs
    click.echo(_table(found))
    for name, difference in found.differences.items():
        if not difference.graph.empty:
            emit(text_view.plain(""))
            emit(diff_view.tree(name, difference.graph, graphs[DEFAULT], graphs[name]))
    for note in dict.fromkeys((*found.explained.notes, *([] if found.explained.rounds else [_NOT_TIMED]))):
        emit(text_view.plain(f"\nnote: {note}"))


def _table(found: Comparison) -> str:
    from tabulate import tabulate

    from ..graph import formats
    from ..graph.analyse.totals import totals

    rows = []
    for name, graph in found.explained.graphs.items():
        difference, time = found.differences.get(name), found.device_time_us(name)
        row: dict[str, Any] = {
            "kernels": None if graph.kernels is None else len(graph.kernels),
            "declared": totals(graph).declared.in_words(formats.size),
            "fused": "" if difference is None else _fused(difference.graph),
        }
        if found.explained.rounds:
            verdict = difference.speedup if difference else None
            row |= {"device us": time, "against the default": str(verdict) if verdict else ""}
        rows.append(row | {"settings": name})
    return tabulate(rows, headers="keys", floatfmt=".1f")


def _fused(change: GraphDiff) -> str:
    if change.empty:
        return "the same"
    swapped = not change.buffers and all(each.kind == "code" for each in change.kernels)
    return "by other kernels" if swapped and change.kernels else "differently"


def _to_json(found: Comparison) -> dict[str, Any]:
    from ..graph.render import diff_view
    from ..user.ab import DEFAULT

    graphs = found.explained.graphs
    differences = {
        name: {
            "differs": not each.graph.empty, **diff_view.to_json(each.graph, graphs[DEFAULT], graphs[name]),
            "speedup": each.speedup and asdict(each.speedup),
        }
        for name, each in found.differences.items()
    }
    rounds = {name: list(each) for name, each in found.explained.rounds.items()}
    return {**found.explained.to_json(), "schema": "xlafuse.ab/1", "differences": differences, "rounds": rounds}
