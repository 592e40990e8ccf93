"""The program `xlafuse`. It imports a command when the command is used, and prints a user's error as one line."""

from __future__ import annotations

import difflib
import importlib
from typing import Any

import click

from ..base import host
from ..base.usage import UsageError
from ..record.run_folder import RunFolderError
from .terminal import one_line

COMMANDS = (
    "capture", "diff", "doctor", "explain", "export", "extract", "inspect", "list", "merge", "report", "run", "tune",
)


class _OneLineError(click.ClickException):
    """An error that click prints as one line on standard error, with exit code 2."""

    exit_code = 2


class _Commands(click.Group):
    """The commands, imported on use. `xlafuse run` is the object `command` in compare/cli/run.py."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        found: click.Command = importlib.import_module(f".{cmd_name}", __package__).command
        return found

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Refuse an unknown command with near names."""
        name = args[0]
        if name not in COMMANDS and not name.startswith("-"):
            now = " or ".join(difflib.get_close_matches(name, COMMANDS))
            raise click.UsageError(f"No such command {name!r}." + (f" Did you mean xlafuse {now}?" if now else ""), ctx)
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command. An error that the user can correct becomes one line without a traceback."""
        try:
            return super().invoke(ctx)
        except (UsageError, RunFolderError) as problem:
            raise _OneLineError(one_line(problem)) from None


def _show_version(ctx: click.Context, parameter: click.Parameter, asked: bool) -> None:
    """Print the version and exit.

    click.version_option would look the version up at every start, which takes a tenth of most commands' time.
    """
    if asked and not ctx.resilient_parsing:
        click.echo(f"xlafuse, version {host.xlafuse_version()}")
        ctx.exit()


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_show_version,
    help="Show the version and exit.",
)
def cli() -> None:
    """Compare what XLA, TorchInductor, hand-written Triton and raw CUDA make of the same transformer block.

    Start with `xlafuse doctor`: it lists what this machine can run. Then `xlafuse run softmax` compiles, checks and
    times one block. On a GPU this takes two to three minutes a block; without one, kernels are compiled for an H200 and
    checked on the CPU. `xlafuse report` and `xlafuse inspect` then show the folder that the run made. Neither
    needs a GPU or a framework.
    """
