"""The end of `xlafuse run`: findings in words, a table, the page, and commands to try next."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path

import click

from .. import targets
from ..base.usage import UsageError
from ..record.run_folder import RunFolderError

PAGE = "report.html"


def show(folder: Path) -> None:
    """Print the summary of a run, and write its page. A run that was stopped before its first record has none."""
    from ..report import at_a_glance, matrix, rows, run_results, strongest_findings

    found = rows.read(folder).rows if (folder / "run.json").is_file() else []
    if not found:
        return
    run = run_results.read(folder, {})
    click.echo()
    findings = strongest_findings.strongest(run)
    for number, finding in enumerate(findings, 1):
        click.echo(f"{number}. {finding.case}: {finding.headline}\n")
    if at_a_glance.fits(found):
        click.echo(at_a_glance.render(found, _device(found)))
    else:
        click.echo(matrix.render(found))
    click.echo(f"\n{_page(folder)}")
    command, block = _command(), findings[0].block if findings else found[0]["block"]
    click.echo("\nTry next:")
    for arguments, meaning in (
        (f"inspect {folder} --block {block} --why", "each kernel, its operations, and why no more were fused"),
        (f"report {folder}", "every number of every record"),
        ("explain FILE.py:FUNCTION --args 'bf16[4096,4096]'", "the same of a function of your own"),
    ):
        click.echo(f"  {command} {arguments}\n      {meaning}")


def _device(found: list[dict[str, object]]) -> str | None:
    """Return the GPU of the times; None for a TPU target, which has none."""
    target = next((str(row["target"]) for row in found if row["target"]), "gpu")
    return None if targets.is_tpu(target) else target.upper()


def _page(folder: Path) -> str:
    """Write the page into the run's folder; return where it is, or why there is none."""
    from ..report.page import page

    try:
        page.write(folder, folder / PAGE, {}, files=False)
    except (RunFolderError, UsageError) as problem:
        return f"No page was written: {problem}"
    return f"Page: {folder / PAGE}"


def _command() -> str:
    """Return the command of this installation, as the user can type it here."""
    own = Path(sys.executable).with_name("xlafuse")
    found = shutil.which("xlafuse")
    if found is not None and own.exists() and Path(found).samefile(own):
        return "xlafuse"
    return shlex.quote(os.path.relpath(own)) if own.exists() else f"{shlex.quote(sys.executable)} -m xlafuse"
