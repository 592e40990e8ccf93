"""`xlafuse timeline`: merge the timelines of a run's records into one file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from ..base.usage import UsageError, join_some
from ..measure import timeline
from ..record.record import Record
from ..record.run_files import recorded_file
from ..record.run_folder import read_records, read_run
from ..report.rows import only
from .options import record_filters, run_argument
from .terminal import warn


@click.command("timeline")
@run_argument
@record_filters()
@click.option(
    "-o", "--out", type=click.Path(path_type=Path), required=True, metavar="FILE",
    help="The file to write; .gz compresses.",
)
def command(run: Path, filters: Mapping[str, list[str]], out: Path) -> None:
    """Write what host and GPU did in one call of each implementation.

    RUN is a folder that `xlafuse run` made on a GPU. Each record is a process in the timeline. It shows the call's
    phases, the host's launches, and the kernels of each stream with their stages, bytes and FLOPs. Arrows join launches
    to kernels. All records begin at 0 with their first launch. Open the file in https://ui.perfetto.dev or
    chrome://tracing.

    \b
      xlafuse timeline runs/mine --block softmax --direction train -i xla,inductor,triton -o softmax.json.gz
    """
    count = merge(run, filters, out)
    plural = "s" if count > 1 else ""
    click.echo(f"{out}: {count} timeline{plural}; open it in https://ui.perfetto.dev or chrome://tracing")


def merge(run: Path, filters: Mapping[str, list[str]], out: Path) -> int:
    """Write the timelines of the selected records to `out`, and return their number.

    filters: fields of the run's records -> names. A record without a timeline costs a warning. Raises UsageError where
    no timeline is left or a file cannot be read or written, and RunFolderError for a folder that is no run.
    """
    read_run(run)
    records, warnings = read_records(run)
    warn(warnings)
    rows = [
        {
            "record": record, "block": record.case.block, "case": record.case.name, "direction": record.case.direction,
            "implementation": record.implementation,
        }
        for record in records
    ]
    selected = [row["record"] for row in only(rows, **filters)]
    if not selected:
        raise UsageError(f"{run}: these filters leave no record")
    without = [f"{record.id}: no timeline: {_why_none(record)}" for record in selected if _file(record) is None]
    try:
        found = [(record, _loaded(run, record)) for record in selected if _file(record) is not None]
        kept = [(record, document) for record, document in found if document is not None]
        if gone := [record.id for record, document in found if document is None]:
            there = ", ".join(dict.fromkeys(record.implementation for record, _ in kept))
            without.append(
                f"{join_some(gone, 1)}: this run was kept without such timelines"
                + (f"; of the selected records it has those of {there}" if there else "")
            )
        if not kept:
            raise UsageError(f"{run}: {without[-1]}")
        warn(without)
        timeline.save(timeline.merge([document for _, document in kept]), out)
    except ValueError as problem:  # includes TimelineError
        raise UsageError(str(problem)) from None
    except OSError as problem:
        raise UsageError(f"{out}: cannot be written: {problem.strerror}") from None
    return len(kept)


def _loaded(run: Path, record: Record) -> timeline.Document | None:
    """Return the record's timeline; None where the run was kept without it."""
    try:
        return timeline.load(recorded_file(run, record, _file(record)))
    except timeline.TimelineMissing:
        return None


def _file(record: Record) -> Any:
    return (record.trace or {}).get("file")


def _why_none(record: Record) -> str:
    return (record.trace or {}).get("unavailable") or (
        "the run was made without CUPTI, or by a version without timelines" if record.status == "ok" else record.status
    )
