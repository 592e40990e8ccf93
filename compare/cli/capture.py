"""`xlafuse capture`: run a program with a profiler around some of its steps, and keep its compilers' files."""

from __future__ import annotations

import os
from pathlib import Path

import click

from ..base.usage import UsageError


@click.command("capture", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option(
    "-o", "--out", type=click.Path(path_type=Path), required=True, metavar="DIR", help="A new folder for all files."
)
@click.option(
    "--steps", default="3:5", show_default=True, metavar="FIRST:END",
    help="Profile these steps, counted from 0; END is not among them.",
)
@click.argument("words", nargs=-1, required=True, type=click.UNPROCESSED, metavar="COMMAND...")
def command(out: Path, steps: str, words: tuple[str, ...]) -> None:
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

    Exit code: that of the program; 2 where options are wrong or the program cannot be started.
    """
    from ..user import capture_command

    window = capture_command.parse_steps(steps)
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
