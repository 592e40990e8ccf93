"""`xlafuse list`: blocks, cases and implementations; and the targets."""

from __future__ import annotations

from pathlib import Path

import click

from ..base.usage import UsageError, one_of, write_file
from .options import json_option, names


@click.command("list")
@click.argument("blocks", nargs=-1, callback=names, metavar="[BLOCK... | targets]")
@json_option
@click.option(
    "-o", "--out", type=click.Path(path_type=Path), metavar="FILE.md",
    help="Write a Markdown table with one line a block.",
)
def command(blocks: list[str], as_json: bool, out: Path | None) -> None:
    """Show blocks (default: all) with their cases and implementations.

    `xlafuse list targets` shows the GPUs and TPUs to compile for instead: what was measured on each, what is from a
    data sheet, and the sources.
    """
    from ..report import block_list, target_list
    from ..spec.blocks import BLOCKS

    if blocks == ["targets"]:
        if out is not None:
            raise UsageError("-o writes the table of blocks; leave it out for targets")
        click.echo(target_list.as_json() if as_json else target_list.as_text())
        return
    shown = [BLOCKS[one_of("block", name, BLOCKS)] for name in blocks] or list(BLOCKS.values())
    if out is None:
        click.echo(block_list.as_json(shown) if as_json else block_list.as_text(shown))
    elif as_json or out.suffix != ".md":
        raise UsageError("-o FILE.md writes the Markdown table; --json prints JSON")
    else:
        write_file(out, f"{block_list.as_markdown(shown)}\n".encode())
