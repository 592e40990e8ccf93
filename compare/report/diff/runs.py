"""The changes between two runs, record by record: times, fusion, status, new and missing records."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from ... import targets
from ...base.usage import UsageError
from ...graph.analyse.diff import GraphDiff
from ...graph.analyse.diff import diff as graph_differences
from ...graph.model import FusionGraph
from ...record.record import Record
from ...record.run_folder import read_run
from ...sources.graph_sources import Contents, GraphSource
from .. import rows
from ..columns import Row
from . import environment, times

GOOD = ("ok", "compiled")
# Kinds of regression, as `--fail-on` names them.
REGRESSIONS = {
    "slower": "kernels take longer",
    "launch-gap": "the call takes longer, but its kernels do not: the gaps between launches grew",
    "status": "the record was ok or compiled and is no longer",
    "kernels": "the call launches more kernels",
    "bytes": "the kernels declare more bytes",
    "missing": "the record is gone",
}
DEFAULT_FAIL_ON = tuple(kind for kind in REGRESSIONS if kind != "launch-gap")


@dataclass(frozen=True)
class RunRecord:
    """The record of one run with its row of report columns, and its graph if it has a readable one."""

    record: Record
    row: Row
    graph: FusionGraph | None = None


@dataclass(frozen=True)
class RecordChange:
    """The changes of one record.

    before, after: None if only the other run has the record. times: None if neither run timed it. graph: None if the
    graphs cannot be compared. notes: what could not be compared, and why. worse: keys of REGRESSIONS. other_card: the
    GPUs of both runs where they differ ("NVIDIA H200 → NVIDIA A100"), else "".
    """

    id: str
    before: RunRecord | None
    after: RunRecord | None
    times: times.TimeChange | None = None
    graph: GraphDiff | None = None
    notes: tuple[str, ...] = ()
    worse: tuple[str, ...] = ()
    other_card: str = ""

    @property
    def regressions(self) -> tuple[str, ...]:
        """The keys of `worse`; none between different GPUs, because nothing needs to have become worse there."""
        return () if self.other_card else self.worse

    def pair(self, name: str) -> tuple[Any, Any]:
        """Return a column's values before and after; None for a missing record or value."""
        before, after = self.before, self.after
        return (None if before is None else before.row[name], None if after is None else after.row[name])

    @property
    def status_changed(self) -> bool:
        before, after = self.pair("status")
        return None not in (before, after) and before != after

    @property
    def compared(self) -> bool:
        """True if times, graphs or status were compared, or only one run has the record."""
        timed = self.times is not None and self.times.word is not None
        return timed or self.graph is not None or self.status_changed or None in (self.before, self.after)

    @property
    def differs(self) -> bool:
        """True if the time, the fusion or the status changed, or only one run has the record."""
        word = self.times.word if self.times else None
        fused = self.graph is not None and not self.graph.empty
        missing = None in (self.before, self.after)
        return fused or self.status_changed or missing or word not in (None, "tie", "unresolved")


@dataclass(frozen=True)
class RunDiff:
    """The comparison of two runs.

    tolerance: relative; a smaller change of a time or of bytes counts as none. fail_on: keys of REGRESSIONS.
    """

    before: Path
    after: Path
    environment: list[environment.Difference]
    changes: list[RecordChange]
    tolerance: float
    fail_on: tuple[str, ...]
    warnings: list[str] = field(default_factory=list)

    @property
    def regressed(self) -> list[RecordChange]:
        """Records with a regression that `fail_on` names."""
        return [change for change in self.changes if set(change.regressions) & set(self.fail_on)]

    @property
    def other_cards(self) -> list[str]:
        """The pairs of different GPUs, as in `RecordChange.other_card`."""
        return list(dict.fromkeys(change.other_card for change in self.changes if change.other_card))

    @property
    def judged(self) -> bool:
        """False if all records are of different GPUs, so none can have regressed."""
        return not all(change.other_card for change in self.changes)

    def timed(self, *words: str) -> list[RecordChange]:
        """Return the records whose time changed in one of these ways, most microseconds first."""
        found = [change for change in self.changes if change.times and change.times.word in words]
        return sorted(found, key=lambda change: -abs(change.times.lost_us if change.times else 0.0))

    @cached_property
    def shared_notes(self) -> tuple[str, ...]:
        """The notes that all of several compared times have, such as "GPUs differ: ...". They are shown once."""
        found = [change.times.notes for change in self.changes if change.times and change.times.word]
        return tuple(note for note in found[0] if all(note in notes for notes in found)) if len(found) > 1 else ()

    def notes_of(self, change: times.TimeChange) -> tuple[str, ...]:
        """Return the notes of a time without the shared ones."""
        return tuple(note for note in change.notes if note not in self.shared_notes)

    @property
    def fused(self) -> list[RecordChange]:
        """Records whose graphs differ, most bytes first."""
        found = [change for change in self.changes if change.graph is not None and not change.graph.empty]
        return sorted(found, key=lambda change: -abs(_increase(*change.pair("bytes_declared"))))

    @property
    def reconfigured(self) -> list[RecordChange]:
        """Records whose kernel configurations have another provenance."""
        pairs = [(change, change.pair("provenance")) for change in self.changes]
        return [change for change, (before, after) in pairs if None not in (before, after) and before != after]


def compare(
    a: Contents, b: Contents, *, tolerance: float, fail_on: Collection[str], wanted: Mapping[str, list[str]]
) -> RunDiff:
    """Compare run `a` with run `b`.

    wanted: names by report column; empty selects all records. Raises UsageError for a name that neither run has and if
    nothing can be compared, and RunFolderError for an unreadable folder.
    """
    warnings: list[str] = []
    runs = read_run(a.path), read_run(b.path)
    entries = _entries(a, warnings), _entries(b, warnings)
    ids = _chosen(entries, wanted)
    if not ids:
        raise UsageError(f"{a.path} and {b.path}: neither run has a record")
    segments = environment.segments(runs[0]), environment.segments(runs[1])
    cards = [{id: _cards(entry, of) for id, entry in side.items()} for side, of in zip(entries, segments, strict=True)]
    everywhere = [frozenset[str]().union(*side.values()) for side in cards]
    changes = [
        replace(
            _change(id, entries[0].get(id), entries[1].get(id), segments, tolerance),
            other_card=_other_card(*(side.get(id, all) for side, all in zip(cards, everywhere, strict=True))),
        )
        for id in ids
    ]
    if not any(change.compared for change in changes):
        raise UsageError(f"{a.path} and {b.path}: no record has a time or a graph in both runs")
    ordered = tuple(kind for kind in REGRESSIONS if kind in fail_on)
    return RunDiff(a.path, b.path, environment.differences(*runs), changes, tolerance, ordered, warnings)


Segments = tuple[Mapping[str, Mapping[str, Any]], Mapping[str, Mapping[str, Any]]]
_Entry = tuple[GraphSource, Row]


def _entries(contents: Contents, warnings: list[str]) -> dict[str, _Entry]:
    """Return record and row by id. An unreadable record is left out, with a warning."""
    read = rows.read(contents.path)
    warnings += [warning for warning in read.warnings if warning not in contents.warnings]
    by_id = {rows.id_of(row): row for row in read.rows}
    found = {}
    for each in contents.graphs:
        record = each.record
        assert record is not None, "every graph of a run belongs to a record"
        if (row := by_id.get(record.id)) is not None:
            found[record.id] = each, row
    return found


def _chosen(entries: tuple[dict[str, _Entry], dict[str, _Entry]], wanted: Mapping[str, list[str]]) -> list[str]:
    """Return the wanted ids in the order of the first run, followed by those of the second run alone."""
    listed = [{**row, "id": id} for id, (_, row) in {**entries[0], **entries[1]}.items()]
    return [row["id"] for row in rows.only(listed, **wanted)]


def _change(id: str, a: _Entry | None, b: _Entry | None, segments: Segments, tolerance: float) -> RecordChange:
    if a is None or b is None:
        before, after = (None if entry is None else RunRecord(_record(entry), entry[1]) for entry in (a, b))
        return RecordChange(id, before, after, worse=("missing",) if after is None else ())
    records = _record(a), _record(b)
    sizes = [dict(record.case.sizes) for record in records]
    if sizes[0] != sizes[1]:
        note = f"not compared: the sizes differ, {sizes[0]} before, {sizes[1]} after"
        return RecordChange(id, RunRecord(records[0], a[1]), RunRecord(records[1], b[1]), notes=(note,))
    notes: list[str] = []
    graphs, change = _graphs(a[0], b[0], notes), None
    if graphs[0] is not None and graphs[1] is not None:
        try:
            change = graph_differences(graphs[0], graphs[1])
        except ValueError as problem:
            notes.append(f"graphs not compared: {problem}")
    where = segments[0].get(records[0].segment or "", {}), segments[1].get(records[1].segment or "", {})
    timing = times.compare_times(*records, where, tolerance)
    before, after = RunRecord(records[0], a[1], graphs[0]), RunRecord(records[1], b[1], graphs[1])
    found = RecordChange(id, before, after, timing, change, tuple(notes))
    return replace(found, worse=tuple(_worse(found, tolerance)))


def _cards(entry: _Entry, segments: Mapping[str, Mapping[str, Any]]) -> frozenset[str]:
    """Return the names of the GPUs that a record was compiled for, or else ran on; none where nothing names them."""
    record = _record(entry)
    if record.target is None:
        return frozenset(environment.devices(segments.get(record.segment or "", {})))
    known = targets.of_device(record.target)
    return frozenset([record.target if known is None else targets.load(known).device])


def _other_card(before: Collection[str], after: Collection[str]) -> str:
    """Return "NVIDIA H200 → NVIDIA A100" where both are known and no card is among both, else ""."""
    if not before or not after or set(before) & set(after):
        return ""
    return " → ".join(" or ".join(sorted(side)) for side in (before, after))


def _record(entry: _Entry) -> Record:
    assert entry[0].record is not None
    return entry[0].record


def _graphs(a: GraphSource, b: GraphSource, notes: list[str]) -> tuple[FusionGraph | None, FusionGraph | None]:
    """Return both graphs, each None if none was recorded. An unreadable or one-sided graph adds a note."""
    found: list[FusionGraph | None] = []
    for each in (a, b):
        try:
            found.append(None if each.read is None else each.graph())
        except UsageError as problem:
            notes.append(f"graph not compared: {problem}")
            return None, None
    if (found[0] is None) != (found[1] is None):
        notes.append(f"graphs not compared: none was recorded {'before' if found[0] is None else 'after'}")
    return found[0], found[1]


def _worse(change: RecordChange, tolerance: float) -> Iterable[str]:
    if change.times and change.times.word == "slower":
        yield "slower"
    if change.times and change.times.word == "longer launch gaps":
        yield "launch-gap"
    before, after = change.pair("status")
    if before in GOOD and after not in GOOD:
        yield "status"
    if change.pair("kernel_source")[0] == change.pair("kernel_source")[1] and _increase(*change.pair("kernels")) > 0:
        yield "kernels"
    before, after = change.pair("bytes_declared")
    if before is not None and after is not None and after > before * (1 + tolerance):
        yield "bytes"


def _increase(before: float | None, after: float | None) -> float:
    return 0 if before is None or after is None else after - before
