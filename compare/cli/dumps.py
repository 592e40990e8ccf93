"""`xlafuse dumps`: unpack the compiler's files of one record."""

from __future__ import annotations

from pathlib import Path

import click

from .options import run_argument


@click.command("dumps")
@run_argument
@click.option("--record", "record_id", required=True, metavar="ID", help="block/case/dtype/direction/implementation.")
@click.option("--out", type=click.Path(path_type=Path), required=True, metavar="DIR", help="A new folder.")
def command(run: Path, record_id: str, out: Path) -> None:
    """Unpack the compiler's files of one record for other tools.

    XLA's files get the names of an --xla_dump_to folder, as hlo-opt takes them, and a log folder for XProf. Files of
    Inductor, Triton and NVRTC keep their names. The output lists what was written and what was not kept.

    \b
      xlafuse dumps runs/mine --record softmax/gpt2-scores/bf16/train/xla --out /tmp/softmax
    """
    from ..user import export_dumps

    click.echo(export_dumps.as_text(export_dumps.export(run, record_id, out)))
