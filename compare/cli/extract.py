"""`xlafuse extract`: write one kernel as a Python program of its own."""

from __future__ import annotations

from pathlib import Path

import click


@click.command("extract")
@click.argument("path", type=click.Path(path_type=Path))
@click.argument("kernel")
@click.option(
    "-o", "--out", type=click.Path(path_type=Path, dir_okay=False), required=True, metavar="FILE",
    help="The Python file to write.",
)
@click.option(
    "--module", metavar="NAME|NUMBER", help="The record of a run, or the module where several have the kernel."
)
@click.option(
    "--report", is_flag=True,
    help="Also write the text of an issue for the compiler's project, in Markdown: FILE with the ending .md.",
)
def command(path: Path, kernel: str, out: Path, module: str | None, report: bool) -> None:
    """Write one kernel as a Python file that runs by itself.

    PATH is a run, a folder of `xlafuse capture`, a folder or archive of dumps, HLO as text, or Inductor's
    output_code.py. KERNEL is a number or a name that `xlafuse inspect PATH` shows, the compiler's or a profiler's. The
    file needs jax, or torch and triton. It draws inputs, checks the kernel against its operations one by one, and times
    it on a GPU. `python FILE --replace mine.py:fn` checks and times your function beside it. Nothing in the dump is
    executed here.

    \b
      xlafuse extract dumps/ loop_multiply_fusion -o repro.py
      xlafuse extract reports/h100 loop_multiply_fusion --module gelu/llama-8b/bf16/fwd/xla -o repro.py --report

    Exit code 2 for an unknown kernel (it lists the names), and for one without source, such as a library's.
    """
    from ..user.extract import extract
    from ..user.issue_report import extract_and_report

    for line in (extract_and_report if report else extract)(path, kernel, module, out):
        click.echo(line)
