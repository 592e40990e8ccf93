"""Two runs, record by record: who became faster or slower, is differently fused, newly right or wrong, new or gone."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ...base.usage import UsageError
from ...graph.analyse.diff import GraphDiff
from ...graph.analyse.diff import diff as graph_differences
from ...graph.model import FusionGraph
from ...record.record import Record
from ...record.run_folder import read_run
from ...sources.graph_sources import Contents, GraphSource
from .. import rows
from ..rows import Row
from . import environment, times

GOOD = ("ok", "compiled")
# What counts as a regression, by the word that chooses it.
REGRESSIONS = {
    "slower": "its kernels take longer",
    "host": "its call takes longer, and its kernels do not: gaps between launches",
    "status": "it was right, and is wrong, failed, skipped or timed out",
    "kernels": "it launches more kernels",
    "bytes": "its kernels move more bytes",
    "missing": "its record is gone",
}
DEFAULT_FAIL_ON = tuple(kind for kind in REGRESSIONS if kind != "host")


@dataclass(frozen=True)
class Side:
    """One run's record: its row of numbers, and its graph where it has one that can be read."""

    record: Record
    row: Row
    graph: FusionGraph | None = None


@dataclass(frozen=True)
class RecordChange:
    """before, after: None where only the other run has the record. times: None where neither was timed. graph: None
    where it cannot be compared. notes: what could not be compared, and why. regressions: keys of REGRESSIONS."""

    id: str
    before: Side | None
    after: Side | None
    times: times.Timing | None = None
    graph: GraphDiff | None = None
    notes: tuple[str, ...] = ()
    regressions: tuple[str, ...] = ()

    def pair(self, name: str) -> tuple[Any, Any]:
        """A number or word of the row, before and after; None where it has none."""
        sides = self.before, self.after
        return tuple(None if side is None else side.row[name] for side in sides)  # type: ignore[return-value]

    @property
    def status_changed(self) -> bool:
        before, after = self.pair("status")
        return None not in (before, after) and before != after

    @property
    def compared(self) -> bool:
        """Whether anything of it was held against each other, or is new or gone."""
        timed = self.times is not None and self.times.word is not None
        return timed or self.graph is not None or self.status_changed or None in (self.before, self.after)

    @property
    def differs(self) -> bool:
        timing = self.times.word if self.times else None
        fused = self.graph is not None and not self.graph.empty
        return fused or self.status_changed or None in (self.before, self.after) or (timing or "tie") not in _NOTHING


_NOTHING = ("tie", "unresolved")


@dataclass(frozen=True)
class RunDiff:
    """tolerance: relative; times and bytes that changed by less did not change. fail_on: keys of REGRESSIONS."""

    before: Path
    after: Path
    environment: list[environment.Difference]
    changes: list[RecordChange]
    tolerance: float
    fail_on: tuple[str, ...]
    warnings: list[str] = field(default_factory=list)

    @property
    def regressed(self) -> list[RecordChange]:
        """Those that `fail_on` asks for."""
        return [change for change in self.changes if set(change.regressions) & set(self.fail_on)]

    def timed(self, *words: str) -> list[RecordChange]:
        """Those of these words, most microseconds first."""
        found = [change for change in self.changes if change.times and change.times.word in words]
        return sorted(found, key=lambda change: -abs(change.times.lost_us if change.times else 0.0))

    @property
    def fused(self) -> list[RecordChange]:
        """Those whose graphs differ, most bytes first."""
        found = [change for change in self.changes if change.graph is not None and not change.graph.empty]
        return sorted(found, key=lambda change: -abs(_more(*change.pair("bytes_moved"))))

    @property
    def reconfigured(self) -> list[RecordChange]:
        """Those whose kernels' configurations rest on something else."""
        pairs = [(change, change.pair("provenance")) for change in self.changes]
        return [change for change, (before, after) in pairs if None not in (before, after) and before != after]


def compare(
    a: Contents, b: Contents, *, tolerance: float, fail_on: Collection[str], wanted: Mapping[str, list[str]]
) -> RunDiff:
    """From run `a` to run `b`. wanted: fields of the runs' rows -> names; none: all.

    Raises UsageError for a name that neither run has, or where nothing can be compared, and RunFolderError.
    """
    warnings: list[str] = []
    runs = read_run(a.path), read_run(b.path)
    sides = _sides(a, warnings), _sides(b, warnings)
    ids = _chosen(sides, wanted)
    if not ids:
        raise UsageError(f"{a.path} and {b.path}: no record in either")
    segments = environment.segments(runs[0]), environment.segments(runs[1])
    changes = [_change(id, sides[0].get(id), sides[1].get(id), segments, tolerance) for id in ids]
    if not any(change.compared for change in changes):
        raise UsageError(f"{a.path} and {b.path}: nothing here has a time or a graph on both sides")
    ordered = tuple(kind for kind in REGRESSIONS if kind in fail_on)
    return RunDiff(a.path, b.path, environment.differences(*runs), changes, tolerance, ordered, warnings)


Segments = tuple[Mapping[str, Mapping[str, Any]], Mapping[str, Mapping[str, Any]]]
_Half = tuple[GraphSource, Row]


def _sides(contents: Contents, warnings: list[str]) -> dict[str, _Half]:
    """By id. A record without a row is left out, and said: its fields are not as written by this version."""
    read = rows.read(contents.path)
    warnings += [warning for warning in read.warnings if warning not in contents.warnings]
    by_id = {rows.id_of(row): row for row in read.rows}
    found = {}
    for each in contents.graphs:
        record = each.record
        assert record is not None, "a run's graphs are its records'"
        if (row := by_id.get(record.id)) is not None:
            found[record.id] = each, row
    return found


def _chosen(sides: tuple[dict[str, _Half], dict[str, _Half]], wanted: Mapping[str, list[str]]) -> list[str]:
    """Ids in the order of `a`, then what `b` has alone."""
    listed = [{**row, "id": id} for id, (_, row) in {**sides[0], **sides[1]}.items()]
    return [row["id"] for row in rows.only(listed, **wanted)]


def _change(id: str, a: _Half | None, b: _Half | None, segments: Segments, tolerance: float) -> RecordChange:
    if a is None or b is None:
        before, after = (None if half is None else Side(_record(half), half[1]) for half in (a, b))
        return RecordChange(id, before, after, regressions=("missing",) if after is None else ())
    records = _record(a), _record(b)
    sizes = [dict(record.case.sizes) for record in records]
    if sizes[0] != sizes[1]:
        note = f"other sizes, not compared: {sizes[0]} before, {sizes[1]} after"
        return RecordChange(id, Side(records[0], a[1]), Side(records[1], b[1]), notes=(note,))
    notes: list[str] = []
    graphs, change = _graphs(a[0], b[0], notes), None
    if graphs[0] is not None and graphs[1] is not None:
        try:
            change = graph_differences(graphs[0], graphs[1])
        except ValueError as problem:
            notes.append(f"graphs not compared: {problem}")
    where = segments[0].get(records[0].segment or "", {}), segments[1].get(records[1].segment or "", {})
    try:
        timing = times.judge(*records, where, tolerance)
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as problem:
        timing = None
        notes.append(f"times not compared, its fields are not as written by this version: {problem!r}")
    before, after = (Side(record, half[1], graph) for record, half, graph in zip(records, (a, b), graphs, strict=True))
    found = RecordChange(id, before, after, timing, change, tuple(notes))
    return replace(found, regressions=tuple(_regressions(found, tolerance)))


def _record(half: _Half) -> Record:
    assert half[0].record is not None
    return half[0].record


def _graphs(a: GraphSource, b: GraphSource, notes: list[str]) -> tuple[FusionGraph | None, FusionGraph | None]:
    """None for one that was not recorded on either side; a note where only one side has it, or it cannot be read."""
    found: list[FusionGraph | None] = []
    for each in (a, b):
        try:
            found.append(None if each.read is None else each.graph())
        except UsageError as problem:
            notes.append(f"graph not compared: {problem}")
            return None, None
    if (found[0] is None) != (found[1] is None):
        notes.append(f"no graph recorded {'before' if found[0] is None else 'after'}, graphs not compared")
    return found[0], found[1]


def _regressions(change: RecordChange, tolerance: float) -> Iterable[str]:
    if change.times and change.times.word == "slower":
        yield "slower"
    if change.times and change.times.word == "slower between kernels":
        yield "host"
    before, after = change.pair("status")
    if before in GOOD and after not in GOOD:
        yield "status"
    if change.pair("kernel_source")[0] == change.pair("kernel_source")[1] and _more(*change.pair("kernels")) > 0:
        yield "kernels"
    before, after = change.pair("bytes_moved")
    if before is not None and after is not None and after > before * (1 + tolerance):
        yield "bytes"


def _more(before: float | None, after: float | None) -> float:
    return 0 if before is None or after is None else after - before
