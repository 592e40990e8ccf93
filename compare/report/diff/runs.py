"""The changes between two runs, record by record: times, fusion, status, new and missing records."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from ... import targets
from ...base.usage import UsageError
from ...graph.analyse.diff import GraphDiff
from ...graph.analyse.diff import diff as graph_differences
from ...graph.model import FusionGraph
from ...graph.render import diff_view
from ...record.record import Record
from ...sources.result import Result
from ...sources.source import Source, only
from . import environment, times

SCHEMA = "xlafuse.run-diff/1"
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
class RecordChange:
    """The changes of one record.

    before, after: None if only the other run has the record. times: None if neither run timed it. graph: None if the
    graphs cannot be compared. notes: what could not be compared, and why. worse: keys of REGRESSIONS. other_card: the
    GPUs of both runs where they differ ("NVIDIA H200 → NVIDIA A100"), else "".
    """

    id: str
    before: Result | None
    after: Result | None
    times: times.TimeChange | None = None
    graph: GraphDiff | None = None
    notes: tuple[str, ...] = ()
    worse: tuple[str, ...] = ()
    other_card: str = ""

    @property
    def regressions(self) -> tuple[str, ...]:
        """The keys of `worse`; none between different GPUs, because nothing needs to have become worse there."""
        return () if self.other_card else self.worse

    @property
    def graphs(self) -> tuple[FusionGraph, FusionGraph]:
        """Both graphs, where `graph` is not None."""
        assert self.before and self.after and self.before.graph and self.after.graph
        return self.before.graph, self.after.graph

    def pair(self, name: str) -> tuple[Any, Any]:
        """Return a value of Row before and after; None for a missing record or value."""
        before, after = self.before, self.after
        return (
            None if before is None else getattr(before.row, name), None if after is None else getattr(after.row, name)
        )

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

    def to_json(self) -> dict[str, Any]:
        only = {(True, False): "before", (False, True): "after"}.get((bool(self.before), bool(self.after)))
        compared = ("status", "kernels", "bytes_declared", "provenance")
        return {
            "id": self.id, "only_in": only, "differs": self.differs, "regressions": list(self.regressions),
            "other_card": self.other_card or None,
            **{name: dict(zip(("before", "after"), self.pair(name), strict=True)) for name in compared},
            "times": None if self.times is None else self.times.to_json(),
            "fusion": None if self.graph is None else diff_view.to_json(self.graph, *self.graphs),
            "notes": list(self.notes),
        }


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
    warnings: list[str]

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

    def to_json(self) -> dict[str, Any]:
        """Return the comparison as JSON values; docs/diff.md lists the fields."""
        return {
            "schema": SCHEMA, "before": str(self.before), "after": str(self.after), "tolerance": self.tolerance,
            "fail_on": list(self.fail_on), "regressed": [change.id for change in self.regressed],
            "environment": [asdict(difference) for difference in self.environment],
            "records": [change.to_json() for change in self.changes], "warnings": self.warnings,
        }


def compare(
    a: Source, b: Source, *, tolerance: float, fail_on: Collection[str], wanted: Mapping[str, list[str]]
) -> RunDiff:
    """Compare run `a` with run `b`.

    wanted: names by report column; empty selects all records. Raises UsageError for a name that neither run has and if
    nothing can be compared, and RunFolderError for an unreadable folder.
    """
    runs = a.run or {}, b.run or {}
    sides = [{result.id: result for result in source.results} for source in (a, b)]
    ids = [result.id for result in only({**sides[0], **sides[1]}.values(), wanted)]
    if not ids:
        raise UsageError(f"{a.path} and {b.path}: neither run has a record")
    segments = environment.segments(runs[0]), environment.segments(runs[1])
    cards = [{id: _cards(result, of) for id, result in side.items()} for side, of in zip(sides, segments, strict=True)]
    everywhere = [frozenset[str]().union(*side.values()) for side in cards]
    changes = [
        replace(
            _change(id, sides[0].get(id), sides[1].get(id), segments, tolerance),
            other_card=_other_card(*(side.get(id, all) for side, all in zip(cards, everywhere, strict=True))),
        )
        for id in ids
    ]
    if not any(change.compared for change in changes):
        raise UsageError(f"{a.path} and {b.path}: no record has a time or a graph in both runs")
    ordered = tuple(kind for kind in REGRESSIONS if kind in fail_on)
    warnings = [*a.warnings, *b.warnings]
    return RunDiff(a.path, b.path, environment.differences(*runs), changes, tolerance, ordered, warnings)


Segments = tuple[Mapping[str, Mapping[str, Any]], Mapping[str, Mapping[str, Any]]]


def _change(id: str, a: Result | None, b: Result | None, segments: Segments, tolerance: float) -> RecordChange:
    if a is None or b is None:
        return RecordChange(id, a, b, worse=("missing",) if b is None else ())
    records = _record(a), _record(b)
    sizes = [dict(record.case.sizes) for record in records]
    if sizes[0] != sizes[1]:
        note = f"not compared: the sizes differ, {sizes[0]} before, {sizes[1]} after"
        return RecordChange(id, a, b, notes=(note,))
    difference, notes = _graph_difference(a, b)
    where = segments[0].get(records[0].segment or "", {}), segments[1].get(records[1].segment or "", {})
    timing = times.compare_times(*records, where, tolerance)
    change = RecordChange(id, a, b, timing, difference, notes)
    return replace(change, worse=tuple(_worse(change, tolerance)))


def _cards(result: Result, segments: Mapping[str, Mapping[str, Any]]) -> frozenset[str]:
    """Return the names of the GPUs that a record was compiled for, or else ran on; none where nothing names them."""
    record = _record(result)
    if record.target is None:
        return frozenset(environment.devices(segments.get(record.segment or "", {})))
    known = targets.of_device(record.target)
    return frozenset([record.target if known is None else targets.load(known).device])


def _other_card(before: Collection[str], after: Collection[str]) -> str:
    """Return "NVIDIA H200 → NVIDIA A100" where both are known and no card is among both, else ""."""
    if not before or not after or set(before) & set(after):
        return ""
    return " → ".join(" or ".join(sorted(side)) for side in (before, after))


def _record(result: Result) -> Record:
    assert result.record is not None
    return result.record


def _graph_difference(a: Result, b: Result) -> tuple[GraphDiff | None, tuple[str, ...]]:
    """Return the difference of the graphs; None if a graph was not recorded, with a note where only one is there."""
    if unreadable := a.unreadable or b.unreadable:
        return None, (f"graph not compared: {unreadable}",)
    if a.graph is b.graph is None:
        return None, ()
    if a.graph is None or b.graph is None:
        return None, (f"graphs not compared: none was recorded {'before' if a.graph is None else 'after'}",)
    try:
        return graph_differences(a.graph, b.graph), ()
    except ValueError as problem:
        return None, (f"graphs not compared: {problem}",)


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
