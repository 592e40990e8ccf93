"""The contents of a path: cases, and the results of their implementations with graphs, kernels and times.

A path is a run's folder, or anything else that has graphs (compare.sources.graph_sources): then each module is a case.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from ..base.text import printable
from ..base.usage import UsageError
from ..graph.analyse.roofline import Ceilings
from ..graph.analyse.totals import tally, totals
from ..graph.findings.collect import findings
from ..graph.findings.finding import Finding
from ..graph.model import FusionGraph
from ..plan import paired_rounds
from ..record.record import Record
from ..record.run_folder import read_records, read_run
from ..sources import graph_sources
from ..sources.graph_sources import GraphSource
from ..sources.profile_sources import any_contents
from ..spec.blocks import REPLAYS, UNFUSED
from ..spec.case import Case
from ..spec.dtype import DTYPES
from . import roofline, rows
from .aligned import SideBySide
from .columns import BY_NAME, Row
from .launch_gaps import launch_gaps

# These implementations run without fusion on purpose, so findings and missed fusions leave them out.
BASELINES = frozenset(UNFUSED.values())
MOST_MODULES = 50  # of a folder of dumps, largest first


@dataclass(frozen=True)
class Launch:
    """One kernel, copy or memset that ran (see compare.graph.join.kernel_records). start, end: in seconds."""

    name: str
    start: float
    end: float


@dataclass(frozen=True)
class Result:
    """The record of one implementation of a case, or a graph without a record.

    row: the columns of reports; those that only a record has are None without one.
    group: equal for results whose times may be compared (paired_rounds.comparison_key).
    graph: None if none was recorded or it is unreadable.
    unreadable: the reason why the recorded graph could not be read, or None.
    ceilings: the measured rates of the device or the target that `ceilings_of` names.
    kernels: a row for each kernel (compare.report.roofline.kernels), in launch order.
    launches: the kernels, copies and memsets of a median call, by phase.
    """

    row: Row
    source: GraphSource
    rounds: paired_rounds.Rounds
    group: tuple[Any, ...]
    graph: FusionGraph | None
    unreadable: str | None
    ceilings: Ceilings | None
    ceilings_of: str
    kernels: tuple[Row, ...]
    launches: dict[str, tuple[Launch, ...]]

    @property
    def name(self) -> str:
        return str(self.row["implementation"])

    @property
    def time_us(self) -> float | None:
        time: float | None = self.row["device_time_us"]
        return time


@dataclass(frozen=True)
class CaseResults:
    """A case and its results, in the order of the run.

    number: the case's position, from 0. id: unique in the run. block: its block's name, or that of a module or file.
    label: its name without its block: "llama-8b bf16 train"; "" without records. case: None without records.
    """

    number: int
    id: str
    block: str
    label: str
    case: Case | None
    results: tuple[Result, ...]

    @property
    def timed(self) -> bool:
        return any(result.time_us is not None for result in self.results)

    def comparable(self, result: Result) -> list[Result]:
        """Return the results whose times may be compared with the time of `result`, `result` included."""
        return [other for other in self.results if other.time_us is not None and other.group == result.group]

    def best(self, result: Result) -> Result | None:
        """Return the fastest result that is comparable with `result`; None if `result` has no time.

        A result without fusion is the fastest only among others without fusion.
        """
        others = self.comparable(result) if result.time_us is not None else []
        others = [other for other in others if other.name not in BASELINES] or others
        return min(others, key=lambda other: other.time_us or 0.0, default=None)

    @cached_property
    def judged(self) -> dict[str, paired_rounds.Comparison | None]:
        """The comparison of each result with its fastest comparable one, by name. The fastest ones have no entry."""
        found = {}
        for result in self.results:
            if (best := self.best(result)) is not None and best is not result:
                found[result.name] = paired_rounds.compare_rounds(result.rounds, best.rounds)
        return found

    @property
    def ceilings(self) -> Ceilings | None:
        """The ceilings of the device or target; None where no one device has all graphs."""
        devices = {result.ceilings_of: result.ceilings for result in reversed(self.results) if result.ceilings}
        return next(iter(devices.values())) if len(devices) == 1 else None

    @cached_property
    def findings(self) -> list[Finding]:
        """The findings in the times and in the graphs, these with times if the ceilings of the device are known."""
        results = self.with_own_kernels
        graphs = {result.name: result.graph for result in results if result.graph is not None}
        gaps = list(launch_gaps([result for result in results if result.name in graphs], self.results))
        return gaps + findings(graphs, self.ceilings) if graphs else []

    @property
    def with_own_kernels(self) -> list[Result]:
        """The results whose kernels say something new: not without fusion, and no replay of another one's kernels."""
        graphs = {result.name for result in self.results if result.graph is not None}
        return [r for r in self.results if r.name not in BASELINES and REPLAYS.get(r.name) not in graphs]

    @property
    def ranked(self) -> list[Result]:
        """Results from fastest to slowest, then those without times."""
        return sorted(self.results, key=lambda result: (result.time_us is None, result.time_us or 0.0))


@dataclass(frozen=True)
class Run:
    """The cases of a path, and warnings about unreadable files and records.

    name: of the path. run: the data of run.json; None for a path without records.
    """

    name: str
    run: dict[str, Any] | None
    cases: tuple[CaseResults, ...]
    warnings: tuple[str, ...]

    @property
    def results(self) -> list[Result]:
        return [result for case in self.cases for result in case.results]

    @property
    def timed(self) -> bool:
        return any(case.timed for case in self.cases)

    @cached_property
    def recorded_on(self) -> str:
        return recorded_on(self.results)


def recorded_on(results: Iterable[Result]) -> str:
    """Return the GPU whose recorded times the records have, as "H200"; "" where they have none."""
    known = {str(r.row["target"]).upper() for r in results if r.row["recorded_time_us"] is not None}
    return printable(" and ".join(sorted(known)), 100)


def read(path: Path, wanted: Mapping[str, Iterable[str]]) -> Run:
    """Return the contents of a run's folder, or of another path with graphs.

    wanted: names by report column, as for rows.only; only for a run. Raises RunFolderError if the run cannot be read.
    Raises UsageError if there is nothing to show, or nothing of a wanted name.
    """
    return _read_run(path, wanted) if graph_sources.is_run(path) else _read_graphs(path, wanted)


def _read_run(folder: Path, wanted: Mapping[str, Iterable[str]]) -> Run:
    run = read_run(folder)
    records, warnings = read_records(folder)
    opened = graph_sources.contents_of_records(folder, run, records)
    read_rows = rows.of_records(folder, run, records)
    by_id = {rows.id_of(row): row for row in rows.only(read_rows.rows, **wanted)}
    cases: dict[str, tuple[Case, list[Result]]] = {}
    for source in opened.graphs:
        record = source.record
        if record is None or (row := by_id.get(record.id)) is None:
            continue
        result = _result(row, source, record, read_rows.uncalibrated)
        cases.setdefault(record.case.id, (record.case, []))[1].append(result)
    if not cases:
        raise UsageError(f"{folder}: no record to show; `xlafuse run --out {folder}` makes some")
    listed = tuple(
        CaseResults(number, case.id, case.block, _label(case), case, tuple(results))
        for number, (case, results) in enumerate(cases.values())
    )
    warnings = list(dict.fromkeys([*warnings, *opened.warnings, *read_rows.warnings]))
    return Run(folder.resolve().name, run, listed, tuple(warnings))


def _label(case: Case) -> str:
    precision = "" if case.precision == "ieee" else f" {case.precision}"
    return printable(f"{case.name} {DTYPES[case.dtype].short}{precision} {case.direction}", 120)


def _result(row: Row, source: GraphSource, record: Record, uncalibrated: Container[str]) -> Result:
    graph, unreadable = None, None
    kernels: tuple[Row, ...] = ()
    ceilings: Ceilings | None = None
    ceilings_of = ""
    if source.read is not None:
        try:
            graph = read_graph = source.graph()
            source = replace(source, read=lambda: read_graph)  # later readers do not parse it again
            ceilings, ceilings_of = source.ceilings_for(graph, None)
            row = row | rows.roofline_of(record, graph, ceilings)
            kernels = tuple(roofline.kernels([source], [row]))
        except UsageError as problem:
            unreadable = str(problem)
    if ceilings is not None and not ceilings.streams:
        ceilings = None
    rounds, group = paired_rounds.rounds_of(record), paired_rounds.comparison_key(row, uncalibrated)
    return Result(row, source, rounds, group, graph, unreadable, ceilings, ceilings_of, kernels, _launches(record))


def _read_graphs(path: Path, wanted: Mapping[str, Iterable[str]]) -> Run:
    opened = any_contents(path)
    if any(wanted.values()):
        raise UsageError(f"{path}: no run folder, and --block, --case, --direction and -i select in runs only")
    sources, warnings = opened.graphs, list(opened.warnings)
    if len(sources) > MOST_MODULES:
        warnings.append(f"{path}: {len(sources)} modules; the {MOST_MODULES} largest are shown")
        sources = tuple(sorted(sources, key=lambda each: -(each.cost or 0))[:MOST_MODULES])
    groups: list[tuple[str, Sequence[GraphSource]]] = [(each.name, [each]) for each in sources]
    if opened.kind == "file":  # graphs that one file holds are of one program
        groups = [(path.name, sources)]
    names = Counter(name for name, _ in groups)
    cases = tuple(
        CaseResults(
            number, name if names[name] == 1 else f"{name}/{members[0].number}", name, "", None,
            tuple(_result_of_graph(name, each, alone=len(members) == 1) for each in members),
        )
        for number, (name, members) in enumerate(groups)
    )
    return Run(path.resolve().name, None, cases, tuple(warnings))


def side_by_side(name: str, found: Mapping[str, SideBySide]) -> Run:
    """Return cases of graphs alone, without their records' times: those of several runs are not comparable."""
    cases = []
    for number, (title, shown) in enumerate(found.items()):
        results = []
        for label, graph, source in zip(shown.graphs, shown.graphs.values(), shown.sources, strict=True):
            record = source.record and replace(source.record, implementation=label, parallel=None)
            named = replace(source, name=label, read=partial(_given, graph), record=record)
            result = _result_of_graph(title, named, alone=False)
            if source.ceilings is not None:  # of the run's device, which another run need not have
                result = replace(result, ceilings_of=f"the device of {source.path}")
            results.append(result)
        cases.append(CaseResults(number, title, title, "", None, tuple(results)))
    return Run(name, None, tuple(cases), ())


def _given(graph: FusionGraph) -> FusionGraph:
    return graph


def _result_of_graph(block: str, source: GraphSource, *, alone: bool) -> Result:
    """Return the result of a graph without a record. alone: it is the only one of its case: name it by its compiler."""
    graph, unreadable, ceilings, ceilings_of = None, None, None, ""
    try:
        graph = read_graph = source.graph()
        source = replace(source, name=(alone and graph.compiler) or source.name, read=lambda: read_graph)
        ceilings, ceilings_of = source.ceilings_for(graph, None)
    except UsageError as problem:
        unreadable = str(problem)
    row: Row = dict.fromkeys(BY_NAME) | {"block": block, "implementation": source.name, "status": "compiled"}
    kernels: tuple[Row, ...] = ()
    if graph is not None:
        found = totals(graph, ceilings=ceilings)
        row |= {
            "compiler": graph.compiler, "target": graph.target or None,
            "kernels": tally(kernel.launches for kernel in graph.kernels or ()).exact, "kernel_source": "compiler",
            "bytes_declared": found.declared.exact, "bytes_compulsory": found.compulsory_tally.exact or None,
            "fusion_efficiency": found.fusion_efficiency,
            "roofline_time_us": found.roofline_time_us and found.roofline_time_us.exact,
            "recoverable_us": found.recoverable_us and found.recoverable_us.exact,
        }
        kernels = tuple(roofline.kernels_of_graph(graph, ceilings))
    rounds = paired_rounds.Rounds({}, [])
    return Result(row, source, rounds, (source.name,), graph, unreadable, ceilings, ceilings_of, kernels, {})


def _launches(record: Record) -> dict[str, tuple[Launch, ...]]:
    """Return the kernels, copies and memsets of a median call, by phase."""
    return {
        phase: tuple(Launch(each["name"], each["start"], each["end"]) for each in times.get("records") or ())
        for phase, times in paired_rounds.measured_parts(record).items()
    }
