"""The end of `xlafuse run`: findings in words, a table, the page, and commands to try next."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from .. import targets
from ..base.usage import UsageError
from ..record.run_folder import RunFolderError

if TYPE_CHECKING:
    from ..sources.row import Row
    from ..sources.source import Source

PAGE = "report.html"


def show(folder: Path) -> None:
    """Print the summary of a run, and write its page. A run that was stopped before its first record has none."""
    from ..report import at_a_glance, matrix, strongest_findings
    from ..sources.run_source import is_run, open_run

    source = open_run(folder) if is_run(folder) else None
    if source is None or not source.results:
        return
    rows = [result.row for result in source.results]
    click.echo()
    findings = strongest_findings.strongest(source)
    for number, finding in enumerate(findings, 1):
        click.echo(f"{number}. {finding.case}: {finding.headline}\n")
    if at_a_glance.fits(rows):
        click.echo(at_a_glance.render(rows, _device(rows)))
    else:
        click.echo(matrix.render(rows))
    click.echo(f"\n{_page(source)}")
    command, block = _command(), findings[0].block if findings else rows[0].block
    click.echo("\nTry next:")
    for arguments, meaning in (
        (f"inspect {folder} --block {block} --why", "each kernel, its operations, and why no more were fused"),
        (f"inspect {folder} --view times", "every number of every record"),
        ("explain FILE.py:FUNCTION --args 'bf16[4096,4096]'", "the same of a function of your own"),
    ):
        click.echo(f"  {command} {arguments}\n      {meaning}")


def _device(rows: Sequence[Row]) -> str | None:
    """Return the GPU of the times; None for a target that nothing was measured on."""
    target = next((row.target for row in rows if row.target), "gpu")
    return None if target in targets.names() and not targets.is_measured(target) else target.upper()


def _page(source: Source) -> str:
    """Write the page into the run's folder; return where it is, or why there is none."""
    from ..report.page import page

    try:
        page.write(source, source.path / PAGE, files=False)
    except (RunFolderError, UsageError) as problem:
        return f"No page was written: {problem}"
    return f"Page: {source.path / PAGE}"


def _command() -> str:
    """Return the command of this installation, as the user can type it here."""
    own = Path(sys.executable).with_name("xlafuse")
    found = shutil.which("xlafuse")
    if found is not None and own.exists() and Path(found).samefile(own):
        return "xlafuse"
    return shlex.quote(os.path.relpath(own)) if own.exists() else f"{shlex.quote(sys.executable)} -m xlafuse"
