"""The command line: commands read their arguments, hand them on, and print. Slow imports wait until needed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from compare import machine
from compare.record import RunFolderError
from compare.selection import UsageError


class _Refusal(click.ClickException):
    """One line on standard error, exit code 2."""

    exit_code = 2


class _Commands(click.Group):
    """Says what the user can mend in one line, without a traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (UsageError, RunFolderError) as problem:
            raise _Refusal(_one_line(problem)) from None


def _one_line(problem: object) -> str:
    from compare.report import printable

    return printable(str(problem), 2000)


def _names(ctx: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> list[str]:
    """Repeated options and comma lists, as one list. An empty one, as from an unset shell variable, is refused."""
    names = [name.strip() for value in values for name in value.split(",")]
    if not all(names):
        raise UsageError(f"{'/'.join(parameter.opts)} got an empty name; leave the option out to take everything")
    return names


def _filter(*flags: str, metavar: str, help: str) -> Any:
    return click.option(*flags, multiple=True, callback=_names, metavar=metavar, help=help)


def _direction_option() -> Any:
    return _filter(
        "--direction", "directions", metavar="fwd|train",
        help="Only inference (fwd), or only training: forward and backward.",
    )


json_option = click.option("--json", "as_json", is_flag=True, help="JSON for programs instead of text.")
run_argument = click.argument("run", type=click.Path(path_type=Path), metavar="RUN")


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(machine.xlafuse_version(), prog_name="xlafuse")
def cli() -> None:
    """See what XLA, TorchInductor, hand-written Triton and raw CUDA make of the same transformer block.

    Start with `xlafuse doctor` (what this machine can do), then `xlafuse run` (a few minutes on a GPU; without
    one, kernels are compiled for an H200 and checked on the CPU), then `xlafuse report` and `xlafuse inspect` on
    the folder that it made. Those two need neither a GPU nor a framework.
    """


@cli.command()
@click.argument("blocks", nargs=-1, callback=_names, metavar="[BLOCK]...")
@click.option(
    "--suite", metavar="quick|full|check",
    help="quick: two cases a block, minutes (default). full: every dtype and size. check: small odd sizes.",
)
@_filter("-i", "--implementation", "implementations", metavar="NAME", help="Only these (repeat it, or a,b,c).")
@_filter("--case", "cases", metavar="NAME", help="Only these cases: a name such as llama-8b, or a full id.")
@_direction_option()
@_filter("--dtype", "dtypes", metavar="bf16|fp16|fp32", help="Only these dtypes; long names work too.")
@click.option(
    "--target", metavar="NAME",
    help="GPU to compile for without having it. Default: this machine's GPU; where there is none, h200.",
)
@click.option("--out", type=click.Path(path_type=Path), metavar="DIR", help="Default: runs/<date-time>-<suite>.")
@click.option(
    "--resume", is_flag=True,
    help="Go on with the run in --out: what is recorded there is kept. Its own selection, unless you name one.",
)
@click.pass_context
def run(
    ctx: click.Context, blocks: list[str], suite: str | None, target: str | None, out: Path | None, resume: bool,
    **filters: list[str],
) -> None:
    """Compile, check and time blocks (default: all).

    Each result is checked against a float64 reference before it is timed, and is written to the run's folder as it
    finishes. `xlafuse list` shows blocks, cases and implementations.

    \b
      xlafuse run softmax
      xlafuse run rmsnorm gelu -i xla,inductor,triton --direction train
      xlafuse run --suite full --out runs/full
      xlafuse run --out runs/full --resume

    Exit code: 0 when all went well, 1 when something was wrong, failed or timed out, 2 when nothing was started.
    """
    from datetime import datetime

    from compare import selection

    if resume:
        folder, recorded = selection.resumed_folder(out)
        plan = selection.resolve_again(recorded, blocks, suite, **filters)
        target = selection.resolve_target(target or recorded.get("target"))
    else:
        plan = selection.resolve(blocks, suite=suite or selection.DEFAULT_SUITE, **filters)
        target = selection.resolve_target(target)
        folder = selection.output_folder(out, suite=plan.suite, now=datetime.now())
    from compare.run import execute

    code = execute(plan, folder=folder, target=target, resume=resume)
    _show_at_a_glance(folder)
    ctx.exit(code)


def _show_at_a_glance(folder: Path) -> None:
    from compare.report import matrix, rows

    if not (folder / "records.jsonl").is_file():  # stopped before the first record
        return
    click.echo(f"\n{matrix.render(rows.read(folder).rows)}\n")
    click.echo(f"xlafuse report {folder}   has the numbers behind it")
    click.echo(f"xlafuse inspect {folder}  shows each kernel and what is in it")


@cli.command("list")
@json_option
def list_command(as_json: bool) -> None:
    """Show blocks, cases and implementations."""
    from compare import listing

    click.echo(listing.as_json() if as_json else listing.as_text())


@cli.command()
@json_option
@click.pass_context
def doctor(ctx: click.Context, as_json: bool) -> None:
    """Say what this machine can run.

    And what is missing, with the command that installs it. Exit code 1 when nothing can run.
    """
    from compare import doctor

    diagnosis = doctor.examine()
    click.echo(doctor.as_json(diagnosis) if as_json else doctor.as_text(diagnosis))
    ctx.exit(0 if diagnosis.anything_runs else 1)


@cli.command()
@run_argument
@json_option
@click.option("--markdown", is_flag=True, help="Markdown, to paste into an issue or a page.")
@click.option("--matrix", is_flag=True, help="Cases down, implementations across: device times, or kernel counts.")
@_filter("--block", "blocks", metavar="NAME", help="Only these blocks.")
@_filter("--case", "cases", metavar="NAME", help="Only these cases.")
def report(
    run: Path, as_json: bool, markdown: bool, matrix: bool, blocks: list[str], cases: list[str]
) -> None:
    """Show a run's results as a table.

    RUN is the folder that `xlafuse run` made. Who was right, how fast, and how near to what the GPU can do.
    """
    from compare.report import matrix as at_a_glance
    from compare.report import rows, table

    if as_json and (markdown or matrix):
        raise UsageError("--json goes with neither --markdown nor --matrix")
    found = rows.read(run)
    _warn(found.warnings)
    chosen = rows.only(found.rows, block=blocks, case=cases)
    if as_json:
        click.echo(rows.as_json(chosen))
    else:
        click.echo((at_a_glance if matrix else table).render(chosen, markdown=markdown))


@cli.command("inspect")
@run_argument
@_filter("--block", "blocks", metavar="NAME", help="Only these blocks.")
@_filter("--case", "cases", metavar="NAME", help="Only these cases.")
@_direction_option()
@_filter("-i", "--implementation", "implementations", metavar="NAME", help="Only these implementations.")
@json_option
def inspect_command(
    run: Path, blocks: list[str], cases: list[str], directions: list[str], implementations: list[str], as_json: bool
) -> None:
    """Show the kernels inside each result.

    RUN is the folder that `xlafuse run` made. Kernels come in the order they run, each with the source operations
    and lines that are in it, and with its time where the device's records name it beyond doubt.
    """
    from compare import inspect_run

    views, warnings = inspect_run.read(
        run, block=blocks, case=cases, direction=directions, implementation=implementations
    )
    _warn(warnings)
    if as_json:
        click.echo(inspect_run.as_json(views))
    else:
        inspect_run.show(views)


def _warn(warnings: list[str]) -> None:
    for warning in warnings:
        click.echo(f"warning: {_one_line(warning)}", err=True)
