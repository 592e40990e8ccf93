"""Arguments and options that several commands share."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from .. import targets
from ..base.usage import UsageError

Command = Callable[..., None]

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON for programs instead of text.")
target_option = click.option(
    "--target", metavar="NAME",
    help=f"Compile for this GPU or TPU without having it: {', '.join(targets.names())}. Default: this machine's GPU; "
    f"{targets.DEFAULT} on a machine without one.",
)
run_argument = click.argument("run", type=click.Path(path_type=Path), metavar="RUN")


def names_option(*flags: str, metavar: str, help: str) -> Callable[[Command], Command]:
    """An option that may be repeated and takes comma lists: -i xla,triton -i cuda."""
    return click.option(*flags, multiple=True, callback=names, metavar=metavar, help=help)


def names(ctx: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> list[str]:
    """Return repeated options and comma lists as one list.

    Raises UsageError for an empty name, which an unset shell variable leaves.
    """
    listed = [name.strip() for value in values for name in value.split(",")]
    if not all(listed):
        raise UsageError(f"{'/'.join(parameter.opts)} got an empty name; leave the option out to take everything")
    return listed


def direction_option(scope: str = "") -> Callable[[Command], Command]:
    return names_option(
        "--direction", "directions", metavar="fwd|train|joint",
        help=f"{scope}Only inference (fwd), training as forward and backward calls (train), or both in one program "
        "(joint).",
    )


def record_filters(scope: str = "") -> Callable[[Command], Command]:
    """Add --block, --case, --direction and -i, and pass them on as `filters`: fields of a run's records -> names.

    scope: opens each help text, as in "For a run: ".
    """
    options = (
        names_option("--block", "blocks", metavar="NAME", help=f"{scope}Only these blocks."),
        names_option("--case", "cases", metavar="NAME", help=f"{scope}Only these cases: names or full ids."),
        direction_option(scope),
        names_option(
            "-i", "--implementation", "implementations", metavar="NAME", help=f"{scope}Only these implementations."
        ),
    )

    def decorate(command: Command) -> Command:
        @functools.wraps(command)
        def filtered(
            *args: Any, blocks: list[str], cases: list[str], directions: list[str], implementations: list[str],
            **others: Any,
        ) -> None:
            filters = {"block": blocks, "case": cases, "direction": directions, "implementation": implementations}
            command(*args, filters=filters, **others)

        wrapped: Command = filtered
        for option in reversed(options):
            wrapped = option(wrapped)
        return wrapped

    return decorate
