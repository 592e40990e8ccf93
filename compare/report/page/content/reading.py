"""A run's folder as the page needs it: cases with their implementations, each with its row, rounds and graph."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from ....base.usage import UsageError
from ....graph.analyse.roofline import Ceilings
from ....graph.model import FusionGraph
from ....plan import paired_rounds
from ....record.record import Record
from ....record.run_folder import read_records, read_run
from ....sources import graph_sources
from ....sources.graph_sources import GraphSource
from ....spec.case import Case
from ... import roofline, rows
from ...aligned import UNFUSED
from ...rows import Row

# Implementations that exist to show what fusion saves: that they are slow, or what they did not fuse, tells nothing.
BASELINES = frozenset(UNFUSED.values())
MAIN = ("xla", "inductor", "triton", "cuda")  # what is compared first of all


@dataclass(frozen=True)
class Ran:
    """One kernel, copy or memset, as compare.graph.join.kernel_records wants it; seconds."""

    name: str
    start: float
    end: float


@dataclass(frozen=True)
class Member:
    """One implementation of a case. graph: None where none was recorded, or where it cannot be read; why: that reason.

    group: equal for members whose times may be held against each other (verdicts.comparable). ceilings: of the device,
    or the target; whose: in words. kernels: a row each (compare.report.roofline.kernels), in launch order. ran: by
    part, what ran in a median call.
    """

    row: Row
    found: GraphSource
    rounds: paired_rounds.Rounds
    group: tuple[Any, ...]
    graph: FusionGraph | None
    why: str | None
    ceilings: Ceilings | None
    whose: str
    kernels: tuple[Row, ...]
    ran: dict[str, tuple[Ran, ...]]

    @property
    def name(self) -> str:
        return str(self.row["implementation"])

    @property
    def time_us(self) -> float | None:
        time: float | None = self.row["device_time_us"]
        return time


@dataclass(frozen=True)
class CaseOf:
    """A case with its members in the order in which they were recorded. number: its place in the run, from 0."""

    number: int
    case: Case
    members: tuple[Member, ...]

    @property
    def timed(self) -> bool:
        return any(member.time_us is not None for member in self.members)

    def rivals(self, member: Member) -> list[Member]:
        """Those with times that may be held against its own, itself included."""
        return [other for other in self.members if other.time_us is not None and other.group == member.group]

    def best(self, member: Member) -> Member | None:
        """The fastest of its rivals; None without times."""
        rivals = self.rivals(member) if member.time_us is not None else []
        return min(rivals, key=lambda rival: rival.time_us or 0.0, default=None)

    @cached_property
    def judged(self) -> dict[str, paired_rounds.Judgement | None]:
        """By name, what the rounds say of each that has a best one to be held against."""
        found = {}
        for member in self.members:
            if (best := self.best(member)) is not None and best is not member:
                found[member.name] = paired_rounds.between(member.rounds, best.rounds)
        return found

    @property
    def ranked(self) -> list[Member]:
        """Fastest first, then those without times."""
        return sorted(self.members, key=lambda m: (m.time_us is None, m.time_us or 0.0))


@dataclass(frozen=True)
class Run:
    folder: Path
    run: dict[str, Any]
    cases: tuple[CaseOf, ...]
    warnings: tuple[str, ...]

    @property
    def members(self) -> list[Member]:
        return [member for case in self.cases for member in case.members]

    @property
    def timed(self) -> bool:
        return any(case.timed for case in self.cases)


def read(folder: Path, wanted: Mapping[str, Iterable[str]]) -> Run:
    """wanted: fields of rows -> names, as for rows.only. Raises RunFolderError, and UsageError for a folder without a
    record that can be shown, or for what no record has."""
    run = read_run(folder)
    records, warnings = read_records(folder)
    opened = graph_sources.contents_of_records(folder, run, records)
    read_rows = rows.of_records(folder, run, records, from_graphs=True)
    try:
        apart: Container[str] = rows.segments_that_disagree(run)
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError):
        apart = ()  # rows.read warns of it
    by_id = {rows.id_of(row): row for row in rows.only(read_rows.rows, **wanted)}
    cases: dict[str, tuple[Case, list[Member]]] = {}
    for found in opened.graphs:
        record = found.record
        if record is None or (row := by_id.get(record.id)) is None:
            continue
        cases.setdefault(record.case.id, (record.case, []))[1].append(_member(row, found, apart))
    if not cases:
        raise UsageError(f"{folder}: no record to show; `xlafuse run --out {folder}` makes some")
    listed = tuple(CaseOf(number, case, tuple(members)) for number, (case, members) in enumerate(cases.values()))
    return Run(folder, run, listed, tuple(dict.fromkeys([*warnings, *opened.warnings, *read_rows.warnings])))


_NOT_AS_WRITTEN = (ArithmeticError, AttributeError, IndexError, KeyError, TypeError, ValueError)


def _member(row: Row, found: GraphSource, apart: Container[str]) -> Member:
    record = found.record
    assert record is not None
    graph, why = None, None
    kernels: tuple[Row, ...] = ()
    ceilings: Ceilings | None = None
    whose = ""
    if found.read is not None:
        try:
            graph = found.graph()
            found = replace(found, read=_Read(graph))  # others ask for it again
            ceilings, whose = found.ceilings_for(graph, None)
            kernels = tuple(roofline.kernels([found], [row]))
        except UsageError as problem:
            why = str(problem)
        except _NOT_AS_WRITTEN as problem:
            graph, why = None, f"what was counted of it is not as written by this version: {problem!r}"
    if ceilings is not None and not ceilings.streams:
        ceilings = None
    rounds, group = paired_rounds.rounds_of(record), paired_rounds.comparable(row, apart)
    return Member(row, found, rounds, group, graph, why, ceilings, whose, kernels, _ran(record))


@dataclass(frozen=True)
class _Read:
    graph: FusionGraph

    def __call__(self) -> FusionGraph:
        return self.graph


def _ran(record: Record) -> dict[str, tuple[Ran, ...]]:
    """Nothing of a record that says it otherwise than this version."""
    try:
        return {
            part: tuple(Ran(str(r["name"]), float(r["start"]), float(r["end"])) for r in data.get("records") or ())
            for part, data in paired_rounds.measured_parts(record).items()
        }
    except _NOT_AS_WRITTEN:
        return {}
