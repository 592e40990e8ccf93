"""The results of a run's folder."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..graph.analyse.roofline import Ceilings
from ..measure.clock_calibration import AGREEMENT, disagreement
from ..record.record import Record
from ..record.run_files import recorded_file
from ..record.run_folder import read_records, read_run
from .result import Result
from .row import Group, Row
from .source import Source

if TYPE_CHECKING:
    from ..graph.model import FusionGraph


def is_run(path: Path) -> bool:
    """Return whether the path is the folder of a run, which has records."""
    return (path / "run.json").exists()


def open_run(folder: Path) -> Source:
    """Return a run's results; its warnings name each line and each segment that cannot be read.

    Raises RunFolderError where the folder has no run.json.
    """
    run = read_run(folder)
    records, unread = read_records(folder)
    warnings = list(unread)
    ceilings: dict[str, Ceilings] = {}
    uncalibrated: dict[str, str] = {}
    again: dict[str, Any] = {}
    try:
        ceilings, uncalibrated = ceilings_of(run), segments_that_disagree(run)
        again = {entry["case"]: entry for entry in run.get("again", ())}
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as problem:
        warnings.append(f"{folder / 'run.json'}: its segments or repeated cases cannot be read: {problem!r}")
    for segment, reason in uncalibrated.items():
        warnings.append(f"{folder / 'run.json'}: segment {segment}: {reason}: no ratio between workers is given")
    results = results_of(records, ceilings, uncalibrated, folder, lambda case: again.get(case, run))
    return Source("run", folder, tuple(results), tuple(dict.fromkeys(warnings)), run, ceilings)


def results_of(
    records: Iterable[Record], ceilings: Mapping[str, Ceilings], uncalibrated: Mapping[str, str], folder: Path = Path(),
    made_by: Callable[[str], Mapping[str, Any]] = lambda case: {},
) -> list[Result]:
    """Return the records' results.

    ceilings: by segment. uncalibrated: as `segments_that_disagree` returns. made_by: the program of a case, by its id.
    """
    groups: dict[Group, list[Row]] = {}
    results = []
    for number, record in enumerate(records, 1):
        segment = record.segment or ""
        result = Result(
            record.id, number, folder, _reader(folder, record), record=record, segment_ceilings=ceilings.get(segment),
            uncalibrated=segment in uncalibrated, groups=groups, made_by=made_by(record.case.id),
        )
        groups.setdefault(result.group, []).append(result.row)
        results.append(result)
    return results


def _reader(folder: Path, record: Record) -> Callable[[], FusionGraph] | None:
    """Return a reader of the record's graph, which reads only files in the run's folder."""
    name = record.graph
    if name is None:
        return None

    def read() -> FusionGraph:
        from ..graph import store
        from ..graph.join.measured import with_measured_bytes

        graph = store.load(recorded_file(folder, record, name))
        return with_measured_bytes(graph, record.traffic or {})

    return read


def ceilings_of(run: Mapping[str, Any]) -> dict[str, Ceilings]:
    """Return the ceilings in a run.json, by segment; a segment without a GPU has none."""
    segments = run.get("segments", [])
    return {segment["id"]: Ceilings.from_json(found) for segment in segments if (found := segment["ceilings"])}


def segments_that_disagree(run: Mapping[str, Any]) -> dict[str, str]:
    """Return the segments whose workers' clocks disagree or could not be calibrated, with the reason.

    No time of one worker is compared with another's there.
    """
    reasons = {}
    for segment in run.get("segments", []):
        if without := segment.get("uncalibrated"):
            reasons[segment["id"]] = f"the clock of the worker {' and '.join(without)} could not be calibrated"
        elif (apart := disagreement(segment.get("clocks") or {})) > AGREEMENT:
            reasons[segment["id"]] = f"the workers' clocks differ by {apart:.1%}"
    return reasons
