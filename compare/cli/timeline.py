"""`xlafuse timeline`: timelines of a run's records, merged into one file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from ..base.usage import UsageError
from ..measure import timeline
from ..record.record import Record
from ..record.run_folder import read_records, read_run
from ..report.rows import only
from ..sources.graph_sources import recorded_file

VIEWERS = "open it in https://ui.perfetto.dev or chrome://tracing"


def merged(
    run: Path, wanted: Mapping[str, list[str]], out: Path, warn: Callable[[Iterable[str]], None]
) -> list[str]:
    """Write the timelines of the wanted records to `out`; returns the records' ids.

    wanted: fields of the run's records -> names; none means all. A record without a timeline costs a warning. Raises
    UsageError where nothing is left, or a file cannot be read or written; RunFolderError for what is no run.
    """
    read_run(run)
    records, warnings = read_records(run)
    warn(warnings)
    fields = [
        {
            "record": record, "block": record.case.block, "case": record.case.name, "direction": record.case.direction,
            "implementation": record.implementation,
        }
        for record in records
    ]
    chosen = [row["record"] for row in only(fields, **wanted)]
    if not chosen:
        raise UsageError(f"{run}: no record is left by these filters")
    without = [f"{record.id}: no timeline: {_why_none(record)}" for record in chosen if _file(record) is None]
    found = [(record, str(_file(record))) for record in chosen if _file(record) is not None]
    if not found:
        raise UsageError(f"{run}: {without[0]}")
    warn(without)
    try:
        timeline.save(timeline.merge([timeline.load(recorded_file(run, record, name)) for record, name in found]), out)
    except ValueError as problem:  # a TimelineError, too
        raise UsageError(str(problem)) from None
    except OSError as problem:
        raise UsageError(f"{out}: cannot be written: {problem.strerror}") from None
    return [record.id for record, _ in found]


def _file(record: Record) -> Any:
    return (record.trace or {}).get("file")


def _why_none(record: Record) -> str:
    return (record.trace or {}).get("unavailable") or (
        "the run was made before there were any, or without CUPTI" if record.status == "ok" else record.status
    )
