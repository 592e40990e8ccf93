"""What commands print: views for a terminal, JSON for programs."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.console import RenderableType


def emit(view: RenderableType) -> None:
    """To a terminal in its width, with bold and dim; to anything else as plain lines of 80 columns, or COLUMNS."""
    from rich.console import Console

    from ..graph.render import text_view

    console = Console(highlight=False)
    if console.is_terminal:
        console.print(view)
    else:
        click.echo(text_view.render(view, console.width))


def width() -> int:
    from rich.console import Console

    return Console().width


def echo_json(data: Any) -> None:
    click.echo(json.dumps(data, indent=1))
