"""`xlafuse run`: compile, check and time blocks."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..base import host
from ..base.usage import UsageError, one_of
from . import run_summary
from .options import direction_option, names, names_option, target_option
from .terminal import warn

if TYPE_CHECKING:
    from ..spec.implementation import OwnFunction

_NOT_ON = {
    "--shard": "the cluster's nodes share the work by themselves",
    "--with": "the nodes do not have your file; --shard on each machine and `xlafuse merge` do it",
    "--traffic": "ncu needs the machine itself; run the same command there without --on",
}


def duration(ctx: click.Context, parameter: click.Parameter, text: str | None) -> float | None:
    """Return "9m", "540s" or "1.5h" as seconds."""
    if text is None:
        return None
    form = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([smh])", text)
    if form is None or float(form[1]) == 0:
        raise UsageError(f"--stop-after takes a time such as 9m, 540s or 1.5h; got {text!r}")
    return float(form[1]) * {"s": 1, "m": 60, "h": 3600}[form[2]]


def _sizes(ctx: click.Context, parameter: click.Parameter, texts: tuple[str, ...]) -> list[dict[str, int]]:
    """Return each "sequence=12288,heads=24" as sizes by axis."""
    found = []
    for text in texts:
        pairs = [pair.partition("=") for pair in text.split(",")]
        if not all(axis.strip() and size.strip().isascii() and size.strip().isdecimal() for axis, _, size in pairs):
            raise UsageError(f"--size takes axes and their sizes, such as sequence=12288,heads=24; got {text!r}")
        found.append({axis.strip(): int(size) for axis, _, size in pairs})
    return found


def _own_functions(blocks: list[str], functions: tuple[str, ...], backward: str | None) -> list[OwnFunction]:
    from ..functions.names import quiet_jax
    from ..plan.own_function import own_function
    from ..spec.blocks import BLOCKS

    if functions and len(blocks) != 1:
        raise UsageError("--with needs one BLOCK, whose inputs it takes: xlafuse run attention --with FILE.py:FN")
    if backward is not None and len(functions) != 1:
        raise UsageError("--with-backward is the gradient of one --with function")
    if functions:
        quiet_jax()
    own = [
        own_function(BLOCKS[one_of("block", blocks[0], BLOCKS)], function, backward, Path.cwd())
        for function in functions
    ]
    if len({function.name for function in own}) < len(own):
        raise UsageError("two --with functions have the same name, and rows are named like them: rename one")
    return own


@click.command("run")
@click.argument("blocks", nargs=-1, callback=names, metavar="[BLOCK]...")
@click.option(
    "--suite", metavar="tour|quick|full|parallel|check",
    help="tour: the main size of six blocks, or of each BLOCK, by xla, inductor, triton and cuda (default without a "
    "BLOCK). quick: one to four sizes a block (default with a BLOCK). full: every dtype and size. parallel: "
    "blocks over several GPUs. check: small odd sizes.",
)
@names_option("-i", "--implementation", "implementations", metavar="NAME", help="Only these (repeat it, or a,b,c).")
@click.option(
    "--with", "functions", multiple=True, metavar="FUNCTION",
    help="Add your own function of the BLOCK's inputs (PyTorch, Triton or JAX) as an implementation, named like it: "
    "path/to/file.py:name or package.module:name.",
)
@click.option(
    "--with-backward", "backward", metavar="FUNCTION",
    help="The gradient of the --with function. Default: the framework's own.",
)
@names_option("--case", "cases", metavar="NAME", help="Only these cases: a name such as llama-8b, or a full id.")
@direction_option()
@click.option(
    "--size", "sizes", multiple=True, callback=_sizes, metavar="AXIS=N,...",
    help="Instead of the suite's sizes, a block's main size with other sizes of some axes (repeat it for more sizes): "
    "sequence=12288,heads=24. `xlafuse list BLOCK` shows axes.",
)
@names_option("--dtype", "dtypes", metavar="bf16|fp16|fp32", help="Only these dtypes; long names work too.")
@target_option
@click.option(
    "-o", "--out", type=click.Path(path_type=Path), metavar="DIR", help="Default: runs/<date-time>-<suite>."
)
@click.option(
    "--resume", is_flag=True,
    help="Continue the run in --out and keep its records. Without a selection, the run's own is taken.",
)
@click.option(
    "--again", "repeated", multiple=True, metavar="CASE=REASON",
    help="Measure a case of the run in --out anew, with all its implementations and those of -i, or a case that its "
    "suite has got since. The run keeps the reason.",
)
@names_option(
    "--mode", "modes", metavar="cold|warm|graph|no-graph|triton-launch",
    help="Time calls in these modes too: with a warm L2 (warm), replayed as a CUDA graph (graph), launched kernel by "
    "kernel (no-graph), Triton's kernels by its own launcher (triton-launch). cold is always timed. Default: all in "
    "the main cases of suite full.",
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
    "--on", metavar="ray://HOST:PORT",
    help="Run on the nodes of this Ray cluster: on their GPUs, or with --target on their processors. Records come into "
    "--out on this machine.",
)
@click.option(
    "--xla-autotune-from", metavar="TARGET|RUN",
    help="On a GPU, replay XLA's autotune results of this jax version, recorded in a target (h200) or a run's folder; "
    "kernels without a result are autotuned. Default: XLA autotunes all.",
)
@click.option(
    "--stop-after", callback=duration, metavar="TIME",
    help="On a GPU or with --on, end the run cleanly after TIME (9m, 540s, 1.5h) with exit code 3; --resume goes on.",
)
@click.option("-v", "--verbose", is_flag=True, help="Print a line for each record, not for each block.")
@click.option("--traffic", is_flag=True, help="On a GPU, count the bytes that each kernel moves with ncu, at the end.")
@click.pass_context
def command(
    ctx: click.Context, blocks: list[str], suite: str | None, target: str | None, out: Path | None, resume: bool,
    modes: list[str], restarts: int | None, shard: str | None, on: str | None, xla_autotune_from: str | None,
    stop_after: float | None, verbose: bool, traffic: bool, functions: tuple[str, ...], backward: str | None,
    repeated: tuple[str, ...], **filters: Any,
) -> None:
    """Compile, check and time blocks (default: a tour of six).

    Each result is checked against a float64 reference before it is timed. Each record is written to the run's folder
    as soon as it is finished. `xlafuse list` shows blocks, cases and implementations.

    \b
      xlafuse run
      xlafuse run softmax
      xlafuse run attention --size sequence=12288,heads=24
      xlafuse run rmsnorm gelu -i xla,inductor,triton --direction train
      xlafuse run attention --with mine.py:attention -i xla
      xlafuse run --suite full --out runs/full
      xlafuse run --out runs/full --resume
      xlafuse run --out runs/full --again 'gelu/llama-8b/bf16/fwd=the clocks were low'

    The exit code is 0 when all went well, and 1 when something was wrong, failed or timed out. It is 2 when nothing was
    started, or the folder could no longer be written. It is 3 when --stop-after ended the run before its last record,
    and 130 after Ctrl-C.
    """
    from datetime import datetime

    from ..plan import selection
    from ..run import shards
    from ..run.output_folder import output_folder, resumed_folder

    for option, given in (("--shard", shard), ("--with", functions), ("--traffic", traffic)):
        if on is not None and given:
            raise UsageError(f"--on does not go together with {option}: {_NOT_ON[option]}")
    if resume and shard is not None:
        raise UsageError("--shard is for a new run; --resume continues the shard of the run in --out")
    if resume and xla_autotune_from is not None:
        raise UsageError("--xla-autotune-from is for a new run; --resume keeps the results that the run has")
    filters["own"] = _own_functions(blocks, functions, backward)
    again: dict[str, str] = {}
    if repeated:
        others = [blocks, suite, target, resume, modes, restarts is not None, shard, xla_autotune_from]
        if out is None or any(others) or any(given for name, given in filters.items() if name != "implementations"):
            raise UsageError("--again CASE=REASON goes with --out RUN, which gives selection, target and timing")
        folder, run_json = resumed_folder(out)
        plan, again = selection.repeated(run_json, repeated, filters["implementations"])
        resume, target = True, selection.resolve_target(run_json.get("target"))
    elif resume:
        folder, run_json = resumed_folder(out)
        plan = selection.resolve_again(run_json, blocks, suite, **filters)
        target = selection.resolve_target(target or run_json.get("target"))
    else:
        plan = selection.resolve(blocks, suite=suite or selection.default_suite(blocks), **filters)
        plan = plan if shard is None else shards.shard_of(plan, shard)
        target = selection.resolve_target(target)
        if target is not None or (on is None and not host.gpu_present()):
            plan = selection.over_absent_gpus(plan)
        folder = output_folder(out, suite=plan.suite, now=datetime.now())
    if on is not None and plan.own:
        raise UsageError(f"--on does not go together with --with: {_NOT_ON['--with']}")
    timed = target is None and (on is not None or host.gpu_present())
    if not timed:
        plan = selection.without_replays(plan, filters["implementations"])
    plan = selection.resolve_timing(plan, modes, restarts, timed=timed)
    recorded = [] if xla_autotune_from is None else selection.autotune_results(xla_autotune_from)
    if recorded and not timed:
        raise UsageError("--xla-autotune-from is for a run on a GPU; without one, the target's results are replayed")
    if stop_after is not None and not timed and on is None:
        raise UsageError("--stop-after is for a run on a GPU or with --on; stop a compile for a target with Ctrl-C")
    if traffic:
        from ..run import count_traffic

        count_traffic.refuse(plan, target)
    from ..run.ray_cluster import connected
    from ..run.run import execute

    if timed and on is None and plan.suite == "full" and not resume:
        from ..run import peers_check

        small = peers_check.small_plan((case.block, i) for case, found in plan.work for i in found if i.own is None)
        if small.work:
            click.echo(f"a small call of {len(small.work)} optional peers first", err=True)
            warn(peers_check.in_words(peer) for peer in peers_check.check(small) if peer.status != "ok")

    with contextlib.nullcontext() if on is None else connected(on, gpu=target is None) as cluster:
        code = execute(
            plan, folder=folder, target=target, resume=resume, traffic=traffic, recorded=recorded,
            stop_after=stop_after, verbose=verbose, cluster=cluster, again=again,
        )
    run_summary.show(folder)
    ctx.exit(code)

