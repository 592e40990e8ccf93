"""Export the timelines of a run's records as one file for Perfetto."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..base.usage import UsageError, join_some
from ..measure import timeline
from ..record.record import Record
from ..record.run_files import recorded_file


def export(run: Path, records: Sequence[Record], out: Path) -> tuple[int, list[str]]:
    """Write the timelines of the records to `out`. Return their number, and a warning for records without one.

    Raises UsageError where no timeline is left, or where a file cannot be read or written.
    """
    warnings = [f"{record.id}: no timeline: {_why_none(record)}" for record in records if not _file(record)]
    try:
        loaded = [(record, _loaded(run, record, name)) for record in records if (name := _file(record))]
        kept = [(record, document) for record, document in loaded if document is not None]
        if gone := [record.id for record, document in loaded if document is None]:
            there = ", ".join(dict.fromkeys(record.implementation for record, _ in kept))
            warnings.append(
                f"{join_some(gone, 1)}: this run was kept without such timelines"
                + (f"; of the selected records it has those of {there}" if there else "")
            )
        if not kept:
            raise UsageError(f"{run}: {warnings[-1]}")
        timeline.save(timeline.merge([document for _, document in kept]), out)
    except ValueError as problem:  # includes TimelineError
        raise UsageError(str(problem)) from None
    except OSError as problem:
        raise UsageError(f"{out}: cannot be written: {problem.strerror}") from None
    return len(kept), warnings


def _loaded(run: Path, record: Record, name: str) -> timeline.Document | None:
    """Return the record's timeline; None where the run was kept without it."""
    try:
        return timeline.load(recorded_file(run, record, name))
    except timeline.TimelineMissing:
        return None


def _file(record: Record) -> str | None:
    return record.trace.file if record.trace else None


def _why_none(record: Record) -> str:
    return (record.trace.unavailable if record.trace else None) or (
        "the run was made without CUPTI, or by a version without timelines" if record.status == "ok" else record.status
    )
