"""`xlafuse list`: blocks, cases and implementations."""

from __future__ import annotations

import click

from ..base.usage import UsageError, one_of
from .options import json_option, names


@click.command("list")
@click.argument("blocks", nargs=-1, callback=names, metavar="[BLOCK]...")
@json_option
@click.option("--markdown", is_flag=True, help="Print a Markdown table with one line a block.")
def command(blocks: list[str], as_json: bool, markdown: bool) -> None:
    """Show blocks (default: all) with their cases and implementations."""
    from ..report import block_list
    from ..spec.blocks import BLOCKS

    shown = [BLOCKS[one_of("block", name, BLOCKS)] for name in blocks] or list(BLOCKS.values())
    if as_json and markdown:
        raise UsageError("--json and --markdown exclude each other; choose one")
    form = block_list.as_json if as_json else block_list.as_markdown if markdown else block_list.as_text
    click.echo(form(shown))
