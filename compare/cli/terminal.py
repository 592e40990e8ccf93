"""Output of the commands: views for a terminal, JSON for programs, warnings on standard error."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import click

from ..base.text import printable

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ..report.outline import Outline

MOST_WARNINGS = 8


def emit(view: RenderableType) -> None:
    """Print a view: styled and in full width on a terminal, else as plain text of 80 columns (or COLUMNS)."""
    from rich.console import Console

    from ..graph.render import text_view

    console = Console(highlight=False)
    if console.is_terminal:
        console.print(view)
    else:
        click.echo(text_view.render(view, console.width))


def show(outline: Outline, *, as_json: bool) -> None:
    """Print what a view shows."""
    if as_json:
        click.echo(outline.json())
    elif outline.text is not None:
        click.echo(outline.text(False))
    else:
        for tree in outline.trees():
            emit(tree)


def width() -> int:
    """Return the terminal's width in columns."""
    from rich.console import Console

    return Console().width


def echo_json(data: Any) -> None:
    click.echo(json.dumps(data, indent=1))


def one_line(problem: object) -> str:
    return printable(str(problem), 2000)


def warn(warnings: Iterable[str]) -> None:
    """Print the first warnings and the number of the rest: a run of another version has one for each record."""
    listed = list(warnings)
    for warning in listed[:MOST_WARNINGS]:
        click.echo(f"warning: {one_line(warning)}", err=True)
    if len(listed) > MOST_WARNINGS:
        click.echo(f"warning: and {len(listed) - MOST_WARNINGS} more like these", err=True)
