"""The command line: commands read their arguments, hand them on, and print. Slow imports wait until needed."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click

from ..base import host
from ..base.usage import UsageError
from ..record.run_folder import RunFolderError
from ..run.output_folder import output_folder, resumed_folder

MOST_WARNINGS = 8


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
    from ..base.text import printable

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
        "--direction", "directions", metavar="fwd|train|joint",
        help="Only inference (fwd), training as forward and backward (train), or as one program (joint).",
    )


def _duration(ctx: click.Context, parameter: click.Parameter, text: str | None) -> float | None:
    """Return "9m", "540s" or "1.5h" as seconds."""
    if text is None:
        return None
    form = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([smh])", text)
    if form is None or float(form[1]) == 0:
        raise UsageError(f"--stop-after takes a time such as 9m, 540s or 1.5h; got {text!r}")
    return float(form[1]) * {"s": 1, "m": 60, "h": 3600}[form[2]]


def _show_version(ctx: click.Context, parameter: click.Parameter, asked: bool) -> None:
    """click's own option wants the version before anybody asks, and finding it takes a tenth of most commands' time."""
    if asked and not ctx.resilient_parsing:
        click.echo(f"xlafuse, version {host.xlafuse_version()}")
        ctx.exit()


json_option = click.option("--json", "as_json", is_flag=True, help="JSON for programs instead of text.")
run_argument = click.argument("run", type=click.Path(path_type=Path), metavar="RUN")


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_show_version,
    help="Show the version and exit.",
)
def cli() -> None:
    """See what XLA, TorchInductor, hand-written Triton and raw CUDA make of the same transformer block.

    Start with `xlafuse doctor` (what this machine can do), then `xlafuse run softmax` (two to three minutes a block on
    a GPU; without one, kernels are compiled for an H200 and checked on the CPU), then `xlafuse report` and `xlafuse
    inspect` on the folder that it made. Those two need neither a GPU nor a framework.
    """


@cli.command()
@click.argument("blocks", nargs=-1, callback=_names, metavar="[BLOCK]...")
@click.option(
    "--suite", metavar="quick|full|check",
    help="quick: one to three sizes a block (default). full: every dtype and size. check: small odd sizes.",
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
@_filter(
    "--mode", "modes", metavar="cold|warm|graph|launches",
    help="How calls are timed beside cold (always): warm L2, replayed as a graph, launch by launch. full: all.",
)
@click.option(
    "--restarts", type=click.IntRange(0, 20), metavar="N",
    help="Time each case in N+1 fresh processes of every framework. Default: 2 in suite full, else 0.",
)
@click.option(
    "--shard", metavar="K/N",
    help="The K-th of N shards of about equal work, one for each GPU, all with the same selection; `xlafuse merge` "
    "joins their runs.",
)
@click.option(
    "--xla-autotune-from", metavar="TARGET|RUN",
    help="On a GPU, replay XLA's autotune results of this jax version, recorded in a target (h200) or a run's folder; "
    "kernels without a result are autotuned. Default: XLA autotunes all.",
)
@click.option(
    "--stop-after", callback=_duration, metavar="TIME",
    help="On a GPU, end the run cleanly after TIME (9m, 540s, 1.5h) with exit code 3; --resume goes on.",
)
@click.option("--traffic", is_flag=True, help="Then count the bytes that each kernel moves, by ncu. On a GPU.")
@click.pass_context
def run(
    ctx: click.Context, blocks: list[str], suite: str | None, target: str | None, out: Path | None, resume: bool,
    modes: list[str], restarts: int | None, shard: str | None, xla_autotune_from: str | None,
    stop_after: float | None, traffic: bool,
    **filters: list[str],
) -> None:
    """Compile, check and time blocks (default: all).

    Each result is checked against a float64 reference before it is timed, and is written to the run's folder as it
    finishes. `xlafuse list` shows blocks, cases and implementations.

    \b
      xlafuse run softmax
      xlafuse run rmsnorm gelu -i xla,inductor,triton --direction train
      xlafuse run softmax --mode warm,graph --restarts 2
      xlafuse run --suite full --out runs/full
      xlafuse run --out runs/full --resume

    Exit code: 0 when all went well, 1 when something was wrong, failed or timed out, 2 when nothing was started, or the
    folder could no longer be written, 3 when --stop-after ended the run before its last record.
    """
    from datetime import datetime

    from ..plan import selection
    from ..run import shards

    if resume and shard is not None:
        raise UsageError("--shard is for a new run: --resume goes on with its own shard where nothing is named")
    if resume and xla_autotune_from is not None:
        raise UsageError("--xla-autotune-from is for a new run: a resumed one goes on with its own results")
    if resume:
        folder, run_json = resumed_folder(out)
        plan = selection.resolve_again(run_json, blocks, suite, **filters)
        target = selection.resolve_target(target or run_json.get("target"))
    else:
        plan = selection.resolve(blocks, suite=suite or selection.DEFAULT_SUITE, **filters)
        plan = plan if shard is None else shards.shard_of(plan, shard)
        target = selection.resolve_target(target)
        folder = output_folder(out, suite=plan.suite, now=datetime.now())
    timed = target is None and host.gpu_present()
    plan = selection.resolve_timing(plan, modes, restarts, timed=timed)
    recorded = [] if xla_autotune_from is None else selection.recorded_choices(xla_autotune_from)
    if recorded and not timed:
        raise UsageError("--xla-autotune-from is for a run on a GPU; without one, the target's results are replayed")
    if traffic:
        from ..run import count_traffic

        count_traffic.refuse(plan, target)
    from ..run.run import execute

    code = execute(
        plan, folder=folder, target=target, resume=resume, traffic=traffic, recorded=recorded,
        stop_after=stop_after,
    )
    _show_at_a_glance(folder)
    ctx.exit(code)


def _show_at_a_glance(folder: Path) -> None:
    from ..report import matrix, rows

    if not (folder / "records.jsonl").is_file():  # stopped before the first record
        return
    click.echo(f"\n{matrix.render(rows.read(folder).rows)}\n")
    click.echo(f"xlafuse report {folder}   has the numbers behind it")
    click.echo(f"xlafuse inspect {folder}  shows each kernel and what is in it")


@cli.command("merge")
@click.argument("parts", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="RUN...")
@click.option("--out", required=True, type=click.Path(path_type=Path), metavar="DIR", help="A new folder.")
@click.option("--partial", is_flag=True, help="Merge even where shards of `run --shard` are missing.")
def merge_command(parts: tuple[Path, ...], out: Path, partial: bool) -> None:
    """Put runs of several GPUs, or machines, together as one, each case whole from one of them.

    \b
      CUDA_VISIBLE_DEVICES=0 taskset -c 0-15 xlafuse run --shard 1/2 --out shard1 &
      CUDA_VISIBLE_DEVICES=1 taskset -c 16-31 xlafuse run --shard 2/2 --out shard2 &
      wait; xlafuse merge shard1 shard2 --out whole
    """
    from ..run.merge import merge

    count, missing = merge(parts, out, partial=partial, warn=_warn)
    click.echo(f"{count} records in {out}; xlafuse report {out} shows them")
    if missing:
        click.echo(f"{missing} that were planned are not there: xlafuse run --out {out} --resume makes them", err=True)


@cli.command("list")
@json_option
@click.option("--markdown", is_flag=True, help="A Markdown table: a line a block.")
def list_command(as_json: bool, markdown: bool) -> None:
    """Show blocks, cases and implementations."""
    from ..report import block_list

    if as_json and markdown:
        raise UsageError("--json and --markdown are two forms of one list: name one")
    click.echo(block_list.as_json() if as_json else block_list.as_markdown() if markdown else block_list.as_text())


@cli.command()
@json_option
@click.pass_context
def doctor(ctx: click.Context, as_json: bool) -> None:
    """Say what this machine can run.

    And what is missing, with the command that installs it. Exit code 1 when nothing can run.
    """
    from . import doctor

    diagnosis = doctor.examine()
    click.echo(doctor.as_json(diagnosis) if as_json else doctor.as_text(diagnosis))
    ctx.exit(0 if diagnosis.anything_runs else 1)


@cli.command()
@click.argument("runs", nargs=-1, type=click.Path(path_type=Path), metavar="[RUN RUN]")
@click.option("--trials", type=click.IntRange(10), default=100, show_default=True, help="Runs of the protocol.")
@click.pass_context
def selftest(ctx: click.Context, runs: tuple[Path, ...], trials: int) -> None:
    """Check, on a GPU, that verdicts hold.

    Identical code in two rows must be a tie or unresolved in 98% of trials, and a planted slowdown of 3% be found in
    95%, by the same protocol that times implementations. Of two runs of one suite, where their folders are given, no
    comparison may have opposite winners; that needs no GPU. Exit code 1 when either fails, 2 where there is no GPU to
    time.
    """
    from . import selftest

    if runs:
        if len(runs) != 2:
            raise UsageError(f"selftest compares two runs, got {len(runs)}: xlafuse selftest RUN RUN")
        agreement = selftest.agreement(*runs)
        _warn(agreement.warnings)
        click.echo(agreement)
        ctx.exit(1 if agreement.contradictions else 0)
    from ..measure.clock import cupti_missing
    from ..run.progress import counting
    from ..workers.client import WORKER_FAILURES

    if not host.gpu_present():
        raise UsageError("selftest times kernels, and needs an NVIDIA GPU")
    if reason := cupti_missing():
        raise UsageError(f"selftest times by CUPTI: {reason}")
    try:
        with counting(trials, "trials") as progress:
            outcome = selftest.run(trials, progress)
    except WORKER_FAILURES as problem:
        raise UsageError(f"a worker could not time: {problem}") from None
    click.echo(selftest.as_text(outcome))
    ctx.exit(1 if outcome.problems else 0)


@cli.command()
@run_argument
@json_option
@click.option("--csv", "as_csv", is_flag=True, help="CSV for spreadsheets and notebooks; the columns of --json.")
@click.option("--markdown", is_flag=True, help="Markdown, to paste into a pull request or a page.")
@click.option("--findings", is_flag=True, help="What costs most, in words, from the graphs and times.")
@click.option("--matrix", is_flag=True, help="Cases down, implementations across: device times, or kernel counts.")
@click.option("--roofline", is_flag=True, help="Intensity, bound, attainable rate, recoverable time.")
@click.option("--kernels", is_flag=True, help="With --roofline: a line a kernel.")
@click.option("--traffic", is_flag=True, help="Bytes that must move, that are declared, and that the GPU counted.")
@click.option("--authorship", is_flag=True, help="Lines of kernel code beside the speed that they bring.")
@click.option(
    "--html", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
    help="Everything as one page for a browser, written to FILE.",
)
@click.option("--no-files", is_flag=True, help="With --html: no PTX and SASS in files beside the page.")
@click.option(
    "--picture", type=click.Path(path_type=Path), metavar="FILE",
    help="Draw times, or with --roofline the roofline, into an .svg or .png.",
)
@_filter("--block", "blocks", metavar="NAME", help="Only these blocks.")
@_filter("--case", "cases", metavar="NAME", help="Only these cases.")
@_direction_option()
@_filter("-i", "--implementation", "implementations", metavar="NAME", help="Only these implementations.")
def report(
    run: Path, as_json: bool, as_csv: bool, markdown: bool, kernels: bool, html: Path | None, no_files: bool,
    picture: Path | None, blocks: list[str], cases: list[str], directions: list[str], implementations: list[str],
    **views: bool,
) -> None:
    """Show a run's results as a table, or as a page.

    RUN is the folder that `xlafuse run` made. Who was right, how fast, and how near to what the GPU can do.

    \b
      xlafuse report runs/mine --block softmax --markdown
      xlafuse report runs/mine --case llama-8b --direction fwd --picture times.svg
      xlafuse report runs/mine --csv > mine.csv
      xlafuse report runs/mine --html mine.html
    """
    from . import report as report_cli

    wanted = {"block": blocks, "case": cases, "direction": directions, "implementation": implementations}
    form = report_cli.form_of(as_json=as_json, as_csv=as_csv, markdown=markdown)
    click.echo(
        report_cli.report(
            run, html=html, files=not no_files, views=views, kernels=kernels, form=form, picture=picture,
            wanted=wanted, warn=_warn,
        )
    )


@cli.command("inspect")
@click.argument("paths", nargs=-1, type=click.Path(path_type=Path), metavar="PATH [PATH]")
@_filter("--block", "blocks", metavar="NAME", help="Of a run: only these blocks.")
@_filter("--case", "cases", metavar="NAME", help="Of a run: only these cases.")
@_direction_option()
@_filter("-i", "--implementation", "implementations", metavar="NAME", help="Of a run: only these implementations.")
@click.option("--module", metavar="NAME|NUMBER", help="Of a folder of dumps: this module.")
@click.option("--kernel", metavar="NAME|NUMBER", help="One kernel: its operations, its buffers, who else uses them.")
@click.option("--stage", metavar="NAME", help="Only kernels that hold this stage of the program.")
@click.option("--why", is_flag=True, help="Why there are not fewer kernels: missed fusions, worth most first.")
@click.option(
    "--align", nargs=2, metavar="A B",
    help="Implementations of a run, or two paths, by the program's stages. B may be several: inductor,triton.",
)
@click.option("--passes", is_flag=True, help="What each of XLA's passes changed, where its dump has that.")
@click.option("--dot", is_flag=True, help="Graphviz text.")
@click.option(
    "--model-explorer", type=click.Path(path_type=Path), metavar="FILE", help="JSON for Google's Model Explorer."
)
@click.option("--all", "every", is_flag=True, help="All kernels, modules, reasons; else only the costly ones of many.")
@click.option("--target", metavar="NAME", help="The GPU whose bandwidth prices bytes. Default: the one compiled for.")
@json_option
def inspect_command(
    paths: tuple[Path, ...], blocks: list[str], cases: list[str], directions: list[str], implementations: list[str],
    module: str | None, align: tuple[str, str] | None, **view: Any,
) -> None:
    """Show the kernels that a compiler made, and what is in each.

    PATH is a run's folder; a folder or archive of dumps (XLA's, Inductor's, a record's); or one file: HLO, Inductor's
    output code, a fusion graph's JSON. Kernels come in the order they run, each with its operations and their source
    lines, the bytes that it moves and, where it was measured, its time. Two paths are shown side by side.

    \b
      xlafuse inspect runs/mine --block softmax -i xla,inductor
      xlafuse inspect runs/mine --block softmax --align xla inductor
      xlafuse inspect /tmp/xla_dump --module jit_step --why
      xlafuse inspect module.hlo.pb --json
    """
    from . import inspect

    wanted = {"block": blocks, "case": cases, "direction": directions, "implementation": implementations}
    inspect.inspect(paths, inspect.Question(**view), module=module, align=align, wanted=wanted, warn=_warn)


@cli.command("timeline")
@run_argument
@_filter("--block", "blocks", metavar="NAME", help="Only these blocks.")
@_filter("--case", "cases", metavar="NAME", help="Only these cases.")
@_direction_option()
@_filter("-i", "--implementation", "implementations", metavar="NAME", help="Only these implementations.")
@click.option(
    "-o", "--out", type=click.Path(path_type=Path), required=True, metavar="FILE",
    help="The file to write; .gz compresses.",
)
def timeline_command(
    run: Path, blocks: list[str], cases: list[str], directions: list[str], implementations: list[str], out: Path
) -> None:
    """Put what host and GPU did in one call of each implementation into one file.

    RUN is a folder that `xlafuse run` made on a GPU. Each record is a process: its parts, its host's launches, and its
    kernels by stream with their stages, bytes and FLOPs, an arrow from each launch to what it ran. All begin at 0 with
    their first launch. Open the file in https://ui.perfetto.dev or chrome://tracing.

    \b
      xlafuse timeline runs/mine --block softmax --direction train -i xla,inductor,triton -o softmax.json.gz
    """
    from . import timeline

    wanted = {"block": blocks, "case": cases, "direction": directions, "implementation": implementations}
    ids = timeline.merged(run, wanted, out, _warn)
    click.echo(f"{out}: {len(ids)} timeline{'s' if len(ids) > 1 else ''}; {timeline.VIEWERS}")


@cli.command("dumps")
@run_argument
@click.option("--record", "record_id", required=True, metavar="ID", help="block/case/dtype/direction/implementation.")
@click.option("--out", type=click.Path(path_type=Path), required=True, metavar="DIR", help="A new folder.")
def dumps_command(run: Path, record_id: str, out: Path) -> None:
    """Unpack what a compiler left of one record, for other tools.

    What XLA wrote gets its names of an --xla_dump_to folder, as hlo-opt takes them, and a log folder for XProf. What
    Inductor, Triton and NVRTC left keeps its names. Says what is there, and what is not kept.

    \b
      xlafuse dumps runs/mine --record softmax/gpt2-scores/bf16/train/xla --out /tmp/softmax
    """
    from ..user import export_dumps

    click.echo(export_dumps.as_text(export_dumps.export(run, record_id, out)))


@cli.command("diff")
@click.argument("a", type=click.Path(path_type=Path))
@click.argument("b", type=click.Path(path_type=Path))
@click.option("--tolerance", metavar="SHARE", help="Of runs: times and bytes within it did not change. Default: 5%.")
@_filter(
    "--fail-on", "fail_on", metavar="slower|launch-gap|status|kernels|bytes|missing",
    help="Of runs: what makes exit code 1. Default: all but launch-gap.",
)
@click.option("--html", type=click.Path(path_type=Path), metavar="FILE", help="Of runs: write one HTML file, too.")
@_filter("--block", "blocks", metavar="NAME", help="Of runs: only these blocks.")
@_filter("--case", "cases", metavar="NAME", help="Of runs: only these cases.")
@_direction_option()
@_filter("-i", "--implementation", "implementations", metavar="NAME", help="Of runs: only these implementations.")
@click.option("--all", "every", is_flag=True, help="Of runs: all changes; else the largest of many.")
@click.option("--module", metavar="NAME|NUMBER", help="Of folders of dumps: only this module.")
@json_option
@click.pass_context
def diff_command(
    ctx: click.Context, a: Path, b: Path, tolerance: str | None, fail_on: list[str], html: Path | None,
    blocks: list[str], cases: list[str], directions: list[str], implementations: list[str], every: bool,
    module: str | None, as_json: bool,
) -> None:
    """Show what changed from A to B: before and after an upgrade, a flag, a change.

    Two runs: what they were made with, then what became faster or slower, as far as the rounds of both can tell, is
    newly right or wrong, new or gone, and differently fused. Exit code 1 where something is slower or newly not right,
    launches more kernels, moves more bytes, or is gone (--fail-on), else 0.

    Two folders of dumps, or files, as for `inspect`: kernels that split, merged, appeared and vanished, arrays that are
    written to memory now, other reasons for not fusing; most bytes first. Names and numbers that a compiler gives are
    no difference. Exit code 1 where something differs, else 0.

    \b
      xlafuse diff runs/yesterday runs/today --tolerance 3%
      xlafuse diff runs/jax-0.10 runs/jax-0.11 -i xla --html upgrade.html
      xlafuse diff before.hlo.txt after.hlo.txt

    Exit code 2 when A or B cannot be read, or the question makes no sense.
    """
    from ..base.usage import one_of
    from ..report.diff.runs import REGRESSIONS
    from . import diff

    for kind in fail_on:
        one_of("regression", kind, list(REGRESSIONS), where="for --fail-on")
    wanted = {"block": blocks, "case": cases, "direction": directions, "implementation": implementations}
    share = None if tolerance is None else diff.tolerance(tolerance)
    question = diff.RunQuestion(share, tuple(fail_on), html, every, wanted)
    ctx.exit(1 if diff.diff(a, b, module=module, as_json=as_json, of_runs=question, warn=_warn) else 0)


@cli.command("explain")
@click.argument("functions", nargs=-1, required=True, metavar="FUNCTION...")
@click.option("--inputs", metavar="NAME", help="A function that makes the arguments: package.module:make_inputs.")
@click.option("--args", "shapes", metavar="SHAPES", help="Arguments by shape: 'bf16[4096,4096], bf16[4096], eps=1e-6'.")
@click.option("--grad", is_flag=True, help="What a training step makes of it: forward and backward.")
@click.option("--target", metavar="NAME", help="GPU to compile for without having it. Default: this one, else h200.")
@click.option(
    "--framework", type=click.Choice(["jax", "torch"]),
    help="Where neither the function's type nor its arguments tell: a plain function with --args.",
)
@click.option("--why", is_flag=True, help="Why its kernels are not fewer, most costly first.")
@json_option
@click.option("--out", type=click.Path(path_type=Path), metavar="FILE", help="Save as JSON; .gz compresses.")
@click.option("--timeout", type=float, default=1800.0, show_default=True, metavar="SECONDS", help="For all compiles.")
def explain_command(functions: tuple[str, ...], **options: Any) -> None:
    """Show what a compiler makes of a function of yours.

    FUNCTION is package.module:name or path/to/file.py:name; with () after it, what it returns is explained, such as
    a module that it builds. Several are compared. It is compiled in a process of its own, for this machine's GPU or
    for one that is not there.

    \b
      xlafuse explain layers.py:mlp --args 'bf16[512,4096], bf16[4096,16384]' --framework jax
      xlafuse explain mypackage.layers:attention --inputs mypackage.layers:make_inputs --grad
      xlafuse explain layers.py:plain layers.py:fused --inputs layers.py:make_inputs

    --inputs names a function without parameters. It returns a tuple of positional arguments, a dict of keyword
    arguments, or both as (tuple, dict); anything else is the only argument.

    Exit code: 0 when it was explained, 1 when it could not be compiled, 2 when the question makes no sense.
    """
    from . import explain

    explain.explain(functions, **options)


def _warn(warnings: Iterable[str]) -> None:
    """A few of them, and how many more there are: a run of another version has one for each of its records."""
    listed = list(warnings)
    for warning in listed[:MOST_WARNINGS]:
        click.echo(f"warning: {_one_line(warning)}", err=True)
    if len(listed) > MOST_WARNINGS:
        click.echo(f"warning: and {len(listed) - MOST_WARNINGS} more like these", err=True)
