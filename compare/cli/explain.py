"""`xlafuse explain`: compile functions of the user, found by name, and show their fusion graphs.

With settings of a compiler, one function is compiled as it is and with each variant of them, and the variants are
compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..base.usage import UsageError
from ..report.views import outline
from .options import json_option, target_option
from .report import PAGE, check_ending, write
from .selection import ViewChoice, view_options
from .terminal import echo_json, emit, show, width

if TYPE_CHECKING:
    from ..graph.analyse.diff import GraphDiff
    from ..sources.explained import Explained
    from ..user.variants import Comparison

_NOT_TIMED = "nothing was timed. Without a GPU, a setting that lets the compiler measure candidates changes no choice"


@click.command("explain")
@click.argument("functions", nargs=-1, required=True, metavar="FUNCTION...")
@click.option("--inputs", metavar="NAME", help="A function that makes the arguments: package.module:make_inputs.")
@click.option(
    "--args", "shapes", metavar="SHAPES", help="Arguments by shape: 'bf16[4096,4096], bf16[4096], eps=1e-6'.",
)
@click.option("--grad", is_flag=True, help="Compile a training step: a forward and a backward call.")
@target_option
@click.option(
    "--framework", type=click.Choice(["jax", "torch"]),
    help="Needed where neither the function's type, its arguments nor the names in its code tell.",
)
@click.option(
    "--timeout", type=float, default=1800.0, show_default=True, metavar="SECONDS", help="For all compiles.",
)
@click.option(
    "--xla-flag", "xla_flags", multiple=True, metavar="NAME=VALUE[,NAME=VALUE]",
    help="A variant: flags of XLA, for one JAX function. Repeat it for more variants.",
)
@click.option(
    "--inductor", multiple=True, metavar="NAME=VALUE[,NAME=VALUE]",
    help="A variant: options of torch._inductor.config, for one PyTorch function. Repeat it for more variants.",
)
@click.option(
    "--force", multiple=True, metavar="KERNEL+KERNEL",
    help="A variant: two kernels, by name or number, as one. Repeat it for more variants.",
)
@click.option(
    "--devices", type=click.IntRange(1, 64), default=1, metavar="N",
    help="For a JAX function with a mesh: compile for N absent GPUs.",
)
@view_options
@json_option
@click.option(
    "-o", "--out", type=click.Path(path_type=Path), metavar="FILE",
    help="Also write a file; its ending is its form: .json or .json.gz for the graphs, .html for a page, .md or .csv "
    "for the view.",
)
def command(
    functions: Sequence[str], inputs: str | None, shapes: str | None, grad: bool, target: str | None,
    framework: str | None, xla_flags: Sequence[str], inductor: Sequence[str], force: Sequence[str], devices: int,
    choice: ViewChoice, as_json: bool, out: Path | None, timeout: float,
) -> None:
    """Show what a compiler makes of your function.

    FUNCTION is package.module:name or path/to/file.py:name. With () after the name, the function is called, and its
    result is explained, such as a module that it builds. Several functions are compared. The compile runs in a separate
    process, for this machine's GPU or for an absent one.

    With --xla-flag, --inductor or --force, one function is compiled as it is, and once for each variant. Each variant's
    kernels are compared with those of the first compile. On a GPU all are timed in turns, from a cold L2 cache, and a
    verdict says whether the difference holds. --force makes one kernel of two that the compiler did not fuse.

    With --target a100-80gb,h200,b200 the function is compiled for each, and the others' kernels are compared with those
    for the first.

    \b
      xlafuse explain layers.py:mlp --args 'bf16[512,4096], bf16[4096,16384]' --framework jax
      xlafuse explain mypackage.layers:attention --inputs mypackage.layers:make_inputs --grad
      xlafuse explain layers.py:plain layers.py:fused --inputs layers.py:make_inputs
      xlafuse explain layers.py:mlp --args 'bf16[512,4096], bf16[4096,16384]' \\
        --xla-flag xla_gpu_enable_triton_gemm=false --xla-flag xla_gpu_autotune_level=0
      xlafuse explain layers.py:norm --inputs layers.py:make_inputs --inductor coordinate_descent_tuning=1
      xlafuse explain layers.py:norm --inputs layers.py:make_inputs --force 1+2

    --inputs names a function without parameters. It returns a tuple of positional arguments, a dict of keyword
    arguments, or both as (tuple, dict). Any other value is the only argument.

    Exit code: 0 when it was explained, 1 when it could not be compiled, 2 when names or options are wrong.
    """
    from ..functions.names import arguments_of, call_of, check_name, quiet_jax, resolve
    from ..plan.selection import resolve_target
    from ..user import variants
    from ..user.explain import ExplainError, explain_all, explain_targets

    if out is not None and not {".json", ".gz"} & set(out.suffixes):
        check_ending(out, page_only={})
    compared = variants.parse_variants(xla_flags, inductor, force)
    if compared and len(functions) > 1:
        raise UsageError(f"--xla-flag, --inductor and --force make variants of one function, got {len(functions)}")
    if compared and None not in (framework, compared[0].framework) and framework != compared[0].framework:
        raise UsageError(f"--framework {framework} does not fit settings of {compared[0].framework}'s compiler")
    several = target.split(",") if target and "," in target else []
    for each in several or ([target] if target else []):
        resolve_target(each)
    if len({*several}) < len(several):
        raise UsageError(f"--target {target}: a target is named twice")
    if several and compared:
        raise UsageError(f"--xla-flag, --inductor and --force make variants for one target, got {len(several)}")
    quiet_jax(devices)
    if inputs is not None and shapes is not None:
        raise UsageError("--inputs and --args both give the arguments; choose one")
    for name in (*functions, *([inputs] if inputs is not None else [])):
        check_name(name)
    named = dict(zip(_short(functions), map(resolve, functions), strict=True))
    args, kwargs = arguments_of(inputs, shapes)
    again = {name: partial(call_of, given, inputs, shapes) for name, given in zip(named, functions, strict=True)}
    options: dict[str, Any] = {
        "grad": grad, "devices": devices, "timeout": timeout, "framework": framework,
        "progress": lambda message: click.echo(message, err=True),
    }
    comparison: Comparison | None = None
    try:
        if compared:
            ((name, function),) = named.items()
            comparison = variants.compare(
                function, args, kwargs, compared, target=target, again=again[name], **options
            )
            explained = comparison.explained
        elif several:
            explained = explain_targets(named, args, kwargs, several, again=again, **options)
            comparison = variants.compare_targets(explained) if len(named) == 1 else None
        else:
            explained = explain_all(named, args, kwargs, target=target, again=again, **options)
    except ExplainError as problem:
        if problem.kind == UsageError.__name__:
            raise UsageError(str(problem)) from None
        raise NotCompiled(" ".join(str(problem).split())) from None
    if out is not None and {".json", ".gz"} & set(out.suffixes):
        _save(explained, out)
    elif out is not None:
        form = replace(choice, view=None, kernel=None, price_as=None) if out.suffix.lower() == PAGE else choice
        click.echo(write(explained.source(), out, form, files=False), err=True)
    if choice.given:
        source = explained.source()
        show(outline(choice.view_of(source), source, choice.shown(selected=True)), as_json=as_json)
    elif as_json:
        echo_json(explained.to_json() if comparison is None else _comparison_json(comparison))
    elif comparison is None or several:
        for view in explained.views(width()):
            emit(view)
        if comparison is not None:
            _show_differences(comparison, against=f" against {several[0]}")
    else:
        _show_comparison(comparison)


class NotCompiled(click.ClickException):
    """One line on standard error, exit code 1."""

    exit_code = 1


def _short(functions: Sequence[str]) -> list[str]:
    """Return the names after the colons where they differ, else the full names."""
    short = [function.partition(":")[2].removesuffix("()") for function in functions]
    names = short if len(set(short)) == len(short) else list(functions)
    if len(set(names)) != len(names):
        raise UsageError("the same function is named twice")
    return names


def _save(explained: Explained, out: Path) -> None:
    """Write the graphs to a file. Raises UsageError."""
    try:
        explained.save(out)
    except OSError as problem:
        raise UsageError(f"{out}: cannot be written: {problem.strerror}") from None


def _show_comparison(comparison: Comparison) -> None:
    from ..graph.render import text_view

    explained = comparison.explained
    click.echo(_table(comparison))
    _show_differences(comparison)
    for note in dict.fromkeys((*explained.notes, *([] if explained.times else [_NOT_TIMED]))):
        emit(text_view.plain(f"\nnote: {note}"))


def _show_differences(comparison: Comparison, against: str = "") -> None:
    from ..graph.render import diff_view, text_view

    for name, difference in comparison.differences.items():
        if not difference.graph.empty:
            emit(text_view.plain(""))
            graph = comparison.explained.graphs[name]
            emit(diff_view.tree(f"{name}{against}", difference.graph, comparison.first, graph))


def _table(comparison: Comparison) -> str:
    from tabulate import tabulate

    from ..graph import formats
    from ..graph.analyse.totals import totals
    from ..graph.render.text_view import predicted_words

    rows = []
    for name, graph in comparison.explained.graphs.items():
        difference = comparison.differences.get(name)
        row: dict[str, Any] = {
            "kernels": None if graph.kernels is None else len(graph.kernels),
            "declared": totals(graph).declared.in_words(formats.size),
            "fused": "" if difference is None else _fused(difference.graph),
        }
        if comparison.explained.times:
            speedup = difference.speedup if difference else None
            row["device us"] = comparison.device_time_us(name)
            row["against the default"] = str(speedup) if speedup else ""
        elif time := predicted_words(comparison.explained.predicted[name]):
            row["predicted"] = time
            row["against the default"] = "" if difference is None else comparison.predicted_verdict(name)
        rows.append(row | {"settings": name})
    return tabulate(rows, headers="keys", floatfmt=".1f")


def _fused(change: GraphDiff) -> str:
    if change.empty:
        return "the same"
    swapped = not change.buffers and all(kernel.kind == "code" for kernel in change.kernels)
    return "by other kernels" if swapped and change.kernels else "differently"


def _comparison_json(comparison: Comparison) -> dict[str, Any]:
    from msgspec import to_builtins

    from ..graph.render import diff_view

    graphs = comparison.explained.graphs
    differences = {
        name: {
            "differs": not difference.graph.empty,
            **diff_view.to_json(difference.graph, comparison.first, graphs[name]),
            "speedup": difference.speedup and asdict(difference.speedup),
            "predicted_verdict": comparison.predicted_verdict(name) or None,
            "saving": difference.saving and asdict(difference.saving),
        }
        for name, difference in comparison.differences.items()
    }
    times = to_builtins(comparison.explained.times)
    return {
        **comparison.explained.to_json(), "schema": "xlafuse.variants/1", "differences": differences, "times": times
    }
