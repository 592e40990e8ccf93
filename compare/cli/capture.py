"""`xlafuse capture`: run a program with a profiler around some of its steps, and keep its compilers' files."""

from __future__ import annotations

import os
from pathlib import Path

import click

from ..base.usage import UsageError
from .options import json_option


def _known_switch(ctx: click.Context, parameter: click.Parameter, name: str | None) -> str | None:
    """Return the name of a switch. `--try list` prints the switches and exits. Raises UsageError for an unknown one."""
    if name is None or ctx.resilient_parsing:
        return name
    from ..user.switches import MEANINGS

    if name == "list":
        width = max(map(len, MEANINGS))
        click.echo("\n".join(f"{switch:{width}}  {meaning}" for switch, meaning in MEANINGS.items()))
        ctx.exit()
    from ..user import trial

    trial.check_name(name)
    return name


@click.command("capture", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option(
    "-o", "--out", type=click.Path(path_type=Path), required=True, metavar="DIR", help="A new folder for all files."
)
@click.option(
    "--steps", default="3:5", show_default=True, metavar="FIRST:END",
    help="Profile these steps, counted from 0; END is not among them.",
)
@click.option(
    "--try", "switch", metavar="NAME", is_eager=True, callback=_known_switch,
    help="Run the program twice, as it is and with a switch, and compare both. `--try list` names the switches.",
)
@json_option
@click.argument("words", nargs=-1, required=True, type=click.UNPROCESSED, metavar="COMMAND...")
@click.pass_context
def command(
    ctx: click.Context, out: Path, steps: str, switch: str | None, as_json: bool, words: tuple[str, ...]
) -> None:
    """Run a JAX or PyTorch program and capture its kernels: what was compiled, and how long it ran.

    XLA and Inductor write their files into DIR, and the framework's profiler records some steps. A step ends where a
    torch.optim.Optimizer.step or a jax.profiler.StepTraceAnnotation ends. COMMAND is run as it is, with the same
    standard streams and exit code. Where it starts Python, this process becomes the program; other commands get the
    environment variables that make the compilers write, and are not profiled.

    \b
      xlafuse capture -o runs/step -- python train.py --layers 8
      xlafuse capture -o runs/step --steps 10:20 -- python -m mypackage.train
      torchrun --nproc-per-node 2 --no-python xlafuse capture -o runs/step -- python train.py
      xlafuse inspect runs/step
      xlafuse capture -o runs/cudnn --try attention:cudnn -- python train.py

    With --try, DIR has two captures, `before` and `after`. Shown are whether the program used the switch, whether the
    losses agree within rounding, the time of a step, and the parts of the model that changed.

    Exit code: that of the program; 2 where options are wrong or the program cannot be started. With --try, 1 where the
    switch had no effect or the losses differ, and 2 also where the program fails or its runs cannot be compared.
    """
    from ..user import capture_command

    window = capture_command.parse_steps(steps)
    if switch is not None:
        ctx.exit(_try(switch, out, window, words, as_json=as_json))
    if as_json:
        raise UsageError("--json goes only with --try")
    planned = capture_command.plan(out, window, words, os.environ)
    capture_command.prepare(planned, words, window)
    if not planned.profiled:
        click.echo(
            f"xlafuse capture: {words[0]} is not Python, so no step is profiled; the compilers' files go to "
            f"{planned.folder}. Put `xlafuse capture` where the command starts python", err=True,
        )
    try:
        os.execvpe(planned.command[0], planned.command, dict(planned.environment))
    except OSError as problem:
        raise UsageError(f"{words[0]}: cannot be started: {problem.strerror}") from None


def _try(switch: str, out: Path, steps: tuple[int, int], words: tuple[str, ...], *, as_json: bool) -> int:
    """Run a program twice, print what a switch changed, and return the exit code."""
    from ..report.diff import trials
    from ..user import trial
    from .diff import TOLERANCE
    from .terminal import show

    found = trial.run(
        switch, out, steps, words, os.environ, output=2 if as_json else None,
        progress=lambda message: click.echo(f"xlafuse capture: {message}", err=True),
    )
    show(trials.outline(found, TOLERANCE), as_json=as_json)
    return 0 if found.effect.took and found.losses.agree is not False else 1
