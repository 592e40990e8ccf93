"""`xlafuse merge`: join the runs of several shards or machines."""

from __future__ import annotations

from pathlib import Path

import click

from .terminal import warn


@click.command("merge")
@click.argument("runs", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="RUN...")
@click.option("-o", "--out", required=True, type=click.Path(path_type=Path), metavar="DIR", help="A new folder.")
@click.option("--partial", is_flag=True, help="Merge even where shards of `run --shard` are missing.")
def command(runs: tuple[Path, ...], out: Path, partial: bool) -> None:
    """Join the runs of several GPUs or machines. All records of a case come from one of them.

    \b
      CUDA_VISIBLE_DEVICES=0 taskset -c 0-15 xlafuse run --shard 1/2 --out shard1 &
      CUDA_VISIBLE_DEVICES=1 taskset -c 16-31 xlafuse run --shard 2/2 --out shard2 &
      wait; xlafuse merge shard1 shard2 --out whole
    """
    from ..run.merge import merge

    count, missing = merge(runs, out, partial=partial, warn=warn)
    click.echo(f"{count} records in {out}; xlafuse inspect {out} --view times shows them")
    if missing:
        click.echo(f"{missing} planned records are missing: xlafuse run --out {out} --resume makes them", err=True)
