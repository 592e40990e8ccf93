"""`xlafuse list`: blocks, cases and implementations."""

from __future__ import annotations

import click

from ..base.usage import UsageError
from .options import json_option


@click.command("list")
@json_option
@click.option("--markdown", is_flag=True, help="Print a Markdown table with one line a block.")
def command(as_json: bool, markdown: bool) -> None:
    """Show blocks, cases and implementations."""
    from ..report import block_list

    if as_json and markdown:
        raise UsageError("--json and --markdown exclude each other; choose one")
    click.echo(block_list.as_json() if as_json else block_list.as_markdown() if markdown else block_list.as_text())
