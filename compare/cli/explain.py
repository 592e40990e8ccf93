"""`xlafuse explain`: compile functions of the user, found by name, and show their fusion graphs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from .functions import NotCompiled, arguments, call_of, call_options, check, names, quiet_jax, resolve, save
from .options import json_option
from .terminal import echo_json, emit, width

if TYPE_CHECKING:
    from ..sources.explained import Explained


@click.command("explain")
@click.argument("functions", nargs=-1, required=True, metavar="FUNCTION...")
@call_options
@click.option(
    "--devices", type=click.IntRange(1, 64), default=1, metavar="N",
    help="For a JAX function with a mesh: compile for N absent GPUs.",
)
@click.option("--why", is_flag=True, help="Show missed fusions and the reasons against them, most costly first.")
@json_option
@click.option("--out", type=click.Path(path_type=Path), metavar="FILE", help="Save the graphs as JSON; .gz compresses.")
def command(
    functions: Sequence[str], inputs: str | None, shapes: str | None, grad: bool, target: str | None,
    framework: str | None, devices: int, why: bool, as_json: bool, out: Path | None, timeout: float,
) -> None:
    """Show what a compiler makes of your function.

    FUNCTION is package.module:name or path/to/file.py:name. With () after the name, the function is called, and its
    result is explained, such as a module that it builds. Several functions are compared. The compile runs in a separate
    process, for this machine's GPU or for an absent one.

    \b
      xlafuse explain layers.py:mlp --args 'bf16[512,4096], bf16[4096,16384]' --framework jax
      xlafuse explain mypackage.layers:attention --inputs mypackage.layers:make_inputs --grad
      xlafuse explain layers.py:plain layers.py:fused --inputs layers.py:make_inputs

    --inputs names a function without parameters. It returns a tuple of positional arguments, a dict of keyword
    arguments, or both as (tuple, dict). Any other value is the only argument.

    Exit code: 0 when it was explained, 1 when it could not be compiled, 2 when names or options are wrong.
    """
    from ..plan.selection import resolve_target
    from ..user.explain import ExplainError, explain_all

    resolve_target(target)
    quiet_jax(devices)
    check(*functions, inputs=inputs, shapes=shapes)
    named = dict(zip(names(functions), map(resolve, functions), strict=True))
    args, kwargs = arguments(inputs, shapes)
    try:
        explained = explain_all(
            named, args, kwargs, grad=grad, target=target, devices=devices, framework=framework,  # type: ignore[arg-type]
            timeout=timeout, progress=lambda message: click.echo(message, err=True),
            again={name: partial(call_of, given, inputs, shapes) for name, given in zip(named, functions, strict=True)},
        )
    except ExplainError as problem:
        raise NotCompiled(" ".join(str(problem).split())) from None
    save(explained, out)
    _show(explained, why=why, as_json=as_json)


def _show(explained: Explained, *, why: bool, as_json: bool) -> None:
    if why:
        from .inspect import show_missed_fusions

        show_missed_fusions(((graph, None, "") for graph in explained.graphs.values()), as_json=as_json)
    elif as_json:
        echo_json(explained.to_json())
    else:
        for view in explained.views(width()):
            emit(view)
