"""`xlafuse list`: blocks, cases and implementations."""

from __future__ import annotations

from pathlib import Path

import click

from ..base.usage import UsageError, one_of, write_file
from .options import json_option, names


@click.command("list")
@click.argument("blocks", nargs=-1, callback=names, metavar="[BLOCK]...")
@json_option
@click.option(
    "-o", "--out", type=click.Path(path_type=Path), metavar="FILE.md",
    help="Write a Markdown table with one line a block.",
)
def command(blocks: list[str], as_json: bool, out: Path | None) -> None:
    """Show blocks (default: all) with their cases and implementations."""
    from ..report import block_list
    from ..spec.blocks import BLOCKS

    shown = [BLOCKS[one_of("block", name, BLOCKS)] for name in blocks] or list(BLOCKS.values())
    if out is None:
        click.echo(block_list.as_json(shown) if as_json else block_list.as_text(shown))
    elif as_json or out.suffix != ".md":
        raise UsageError("-o FILE.md writes the Markdown table; --json prints JSON")
    else:
        write_file(out, f"{block_list.as_markdown(shown)}\n".encode())
