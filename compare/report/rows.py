"""Rows of a run: one flat dict a record, with the columns of compare.report.columns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..base.usage import UsageError, one_of
from ..graph.analyse import summary
from ..graph.analyse.roofline import Ceilings
from ..graph.model import FusionGraph
from ..measure.clock_calibration import AGREEMENT, disagreement
from ..plan import paired_rounds, peers
from ..record.record import Record, record_id
from ..record.run_folder import read_records, read_run
from ..sources.graph_sources import Contents
from ..spec.blocks import BLOCKS
from ..spec.case import Case
from . import columns
from .columns import Row
from .record_values import RecordValues


@dataclass(frozen=True)
class Rows:
    """The rows of a run's records, and warnings.

    ceilings: by segment. uncalibrated: segments in which no times of two workers are compared, with the reason.
    """

    rows: list[Row]
    warnings: list[str]
    ceilings: Mapping[str, Ceilings]
    uncalibrated: Mapping[str, str]


def read(folder: Path) -> Rows:
    """Return the rows of a run folder, and a warning for each line and each segment that cannot be read.

    Raises RunFolderError where the folder has no run.json.
    """
    run = read_run(folder)
    records, warnings = read_records(folder)
    found = of_records(folder, run, records)
    return replace(found, warnings=[*warnings, *found.warnings])


def of_records(folder: Path, run: Mapping[str, Any], records: Iterable[Record]) -> Rows:
    """Return what `read` returns, from a run's data that was read before."""
    warnings = []
    try:
        ceilings, uncalibrated = ceilings_of(run), segments_that_disagree(run)
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as problem:
        ceilings, uncalibrated = {}, {}
        warnings.append(f"{folder / 'run.json'}: its segments cannot be read: {problem!r}")
    for id, reason in uncalibrated.items():
        warnings.append(f"{folder / 'run.json'}: segment {id}: {reason}: no ratio between workers is given")
    return Rows(with_comparisons(records, ceilings, uncalibrated), warnings, ceilings, uncalibrated)


def with_comparisons(
    records: Iterable[Record], ceilings: Mapping[str, Ceilings], uncalibrated: Mapping[str, str] | None = None
) -> list[Row]:
    """Return the records' rows, each compared with the baseline's, and the project's own with their best peers.

    ceilings: by segment.
    """
    records = list(records)
    rows = [columns.row_of(RecordValues(record, ceilings.get(record.segment or ""))) for record in records]
    rounds = list(map(paired_rounds.rounds_of, records))
    paired_rounds.add_comparisons(rows, rounds, uncalibrated or {})
    peers.add_best_peers(rows, rounds, uncalibrated or {})
    return rows


def with_rooflines(rows: Iterable[Row], contents: Contents) -> tuple[list[Row], list[str]]:
    """Return a run's rows with rooflines computed from its graphs, and warnings.

    Those in the rows are of the versions that made the records. They stay, with a warning, where a graph is unreadable.
    """
    sources = {source.name: source for source in contents.graphs}
    found, warnings = [], []
    for row in rows:
        source = sources[id_of(row)]
        if source.record is not None and source.read is not None:
            try:
                graph = source.graph()
                row = row | roofline_of(source.record, graph, source.ceilings_for(graph, None)[0])
            except UsageError as problem:
                warnings.append(f"{source.name}: its roofline is the recorded one: {problem}")
        found.append(row)
    return found, warnings


def roofline_of(record: Record, graph: FusionGraph, ceilings: Ceilings | None) -> Row:
    """Return the columns of a record's roofline, computed from its graph; {} without ceilings."""
    if ceilings is None or not ceilings.streams:
        return {}
    found: Any = summary.summary(graph, record.case.phases, ceilings)
    return columns.row_of(RecordValues(replace(record, kernels=found), ceilings), columns.OF_ROOFLINE)


def only(rows: list[Row], **wanted: Iterable[str]) -> list[Row]:
    """Return the rows whose fields have one of the wanted names. Raises UsageError for a name that no row has."""
    for field, names in wanted.items():
        present = list(dict.fromkeys(row[field] for row in rows))
        known = BLOCKS if field == "block" else ()
        names = [one_of(field, name, present, where="among these records", elsewhere=known) for name in names]
        rows = [row for row in rows if not names or row[field] in names]
    return rows


def id_of(row: Row) -> str:
    """Return the id of the row's record."""
    case = Case(row["block"], row["case"], {}, row["dtype"], row["direction"], row["precision"])
    return record_id(case, row["implementation"])


def ceilings_of(run: Mapping[str, Any]) -> dict[str, Ceilings]:
    """Return the ceilings in a run.json, by segment; a segment without a GPU has none."""
    result = {}
    for segment in run.get("segments", []):
        found = segment["ceilings"]
        if found:
            result[segment["id"]] = Ceilings.from_json(found)
    return result


def segments_that_disagree(run: Mapping[str, Any]) -> dict[str, str]:
    """Return the segments whose workers' clocks disagree or could not be calibrated, with the reason.

    No time of one worker is compared with another's there.
    """
    found = {}
    for segment in run.get("segments", []):
        if without := segment.get("uncalibrated"):
            found[segment["id"]] = f"the clock of the worker {' and '.join(without)} could not be calibrated"
        elif (apart := disagreement(segment.get("clocks") or {})) > AGREEMENT:
            found[segment["id"]] = f"the workers' clocks differ by {apart:.1%}"
    return found
