"""`Source`: everything that a path holds, as results in the order of the path."""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from ..base.text import printable
from ..base.usage import UsageError, join_some, one_of
from ..graph.analyse.roofline import Ceilings
from ..record.record import Record
from ..spec.blocks import BLOCKS
from ..spec.case import Case
from ..spec.dtype import DTYPES
from .case_results import CaseResults
from .profiled import ProfiledSteps
from .result import Result

Kind = Literal["run", "dump", "file", "profile"]
MOST_NAMED = 10
SHOWN_AT_ONCE = 2  # modules of a folder, such as forward and backward of one function
MOST_MODULES = 50  # of a folder of dumps, in what shows all of them


@dataclass(frozen=True)
class Source:
    """The results of a path.

    kind: a run's folder, a folder or archive of dumps, one file, or a profile with the graphs of its programs.
    run: the data of run.json. ceilings: of a run's segments. profile: the profile by steps.
    put_together: cases with results of several paths. unprofiled: why a folder of `xlafuse capture` has no profile to
    show; "" elsewhere.
    """

    kind: Kind
    path: Path
    results: tuple[Result, ...]
    warnings: tuple[str, ...] = ()
    run: dict[str, Any] | None = None
    ceilings: Mapping[str, Ceilings] = field(default_factory=dict)
    profile: ProfiledSteps | None = None
    put_together: tuple[CaseResults, ...] | None = None
    unprofiled: str = ""

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def unreadable(self) -> list[str]:
        """A line for each recorded graph that cannot be read. All graphs are read for it."""
        return [f"{result.id}: {result.unreadable}" for result in self.results if result.unreadable]

    @property
    def unreadable_example(self) -> str:
        """The first of these lines, as the end of an error; "" where there is none."""
        return "".join(f"; the first: {line}" for line in self.unreadable[:1])

    # Selection

    def select(self, wanted: Mapping[str, Iterable[str]], module: str | None = None) -> Source:
        """Return the source with only some results.

        wanted: by "block", "case", "direction" and "implementation", names of records; nothing selects all. module:
        number, name or pattern; in a run a record's id. Raises UsageError for a name that no result has.
        """
        if self.run is None:
            if any(wanted.values()):
                raise UsageError(
                    f"{self.path}: no run folder, and --block, --case, --direction and -i select in runs only"
                )
            return self if module is None else replace(self, results=tuple(self.modules(module)))
        kept = only(self.results, wanted)
        if module is not None:
            one_of("record", module, [result.id for result in kept], most=MOST_NAMED, where=f"in {self.path}")
            kept = [result for result in kept if result.id == module]
        return replace(self, results=tuple(kept))

    def modules(self, name: str) -> list[Result]:
        """Return modules by number, name or pattern. Raises UsageError for none, or for more than SHOWN_AT_ONCE."""
        modules = [result for result in self.results if name == str(result.number)]
        modules = modules or [result for result in self.results if result.id == name]
        modules = modules or [result for result in self.results if fnmatch.fnmatchcase(result.id, name)]
        if not modules:
            one_of("module", name, [result.id for result in self.results], most=MOST_NAMED)
        if len(modules) > SHOWN_AT_ONCE:
            numbers = join_some([str(module.number) for module in modules], MOST_NAMED)
            raise UsageError(f"{self.path}: {len(modules)} modules are called {name!r}; choose by number: {numbers}")
        return modules

    def module(self, name: str | None) -> Result:
        """Return the module of that name, or the only one. Raises UsageError where there are several."""
        modules = list(self.results) if name is None else self.modules(name)
        if len(modules) != 1:
            names = join_some([printable(f"{module.number} {module.id}", 60) for module in modules], 5)
            runs = "; to compare two runs: `xlafuse diff`" if self.run is not None else ""
            raise UsageError(
                f"{self.path}: holds {len(modules)} graphs ({names}), and one is needed: --module NUMBER or NAME{runs}"
            )
        return modules[0]

    def largest(self) -> Source:
        """Return the source with at most MOST_MODULES modules, the largest, and a warning where some are left out."""
        if self.run is not None or len(self.results) <= MOST_MODULES:
            return self
        kept = sorted(self.results, key=lambda result: -(result.cost or 0))[:MOST_MODULES]
        warning = f"{self.path}: {len(self.results)} modules; the {MOST_MODULES} largest are shown"
        return replace(self, results=tuple(kept), warnings=(*self.warnings, warning))

    # Cases

    @cached_property
    def cases(self) -> tuple[CaseResults, ...]:
        """The results by case. Without records each module is a case; graphs that one file holds are of one program."""
        if self.put_together is not None:
            return self.put_together
        if self.run is not None:
            return tuple(_cases_of_records(self.results))
        groups: list[tuple[str, Sequence[Result]]] = [(result.id, [result]) for result in self.results]
        if self.kind == "file":
            groups = [(self.path.name, self.results)]
        return tuple(cases_of_graphs(groups))

    @property
    def shown(self) -> list[Result]:
        """The results of all cases, by case."""
        return [result for case in self.cases for result in case.results]

    @property
    def timed(self) -> bool:
        return any(case.timed for case in self.cases)

    @cached_property
    def recorded_on(self) -> str:
        return recorded_on(self.shown)


def only(results: Iterable[Result], wanted: Mapping[str, Iterable[str]]) -> list[Result]:
    """Return the results of records that have one of the wanted names; see `Source.select`."""
    kept = list(results)
    for field_name, names in wanted.items():
        named = [(result, _names(result.record)[field_name]) for result in kept if result.record]
        present = dict.fromkeys(name for _, of_result in named for name in of_result)
        shown = dict.fromkeys(of_result[0] for _, of_result in named)
        known = BLOCKS if field_name == "block" else ()
        chosen = {
            one_of(field_name, name, present, shown, where="among these records", elsewhere=known) for name in names
        }
        kept = [result for result, of_result in named if not chosen or not chosen.isdisjoint(of_result)]
    return kept


def _names(record: Record) -> dict[str, tuple[str, ...]]:
    """Return the names that select a record, the shortest first, by the keys of `wanted`."""
    case = record.case
    return {
        "block": (case.block,), "case": (case.name, case.id), "direction": (case.direction,),
        "implementation": (record.implementation,),
    }


def _cases_of_records(results: Iterable[Result]) -> Iterable[CaseResults]:
    cases: dict[str, tuple[Case, list[Result]]] = {}
    for result in results:
        if result.record is not None:
            cases.setdefault(result.record.case.id, (result.record.case, []))[1].append(result)
    for number, (case, members) in enumerate(cases.values()):
        yield CaseResults(number, case.id, case.block, _label(case), case, tuple(members))


def _label(case: Case) -> str:
    precision = "" if case.precision == "ieee" else f" {case.precision}"
    return printable(f"{case.name} {DTYPES[case.dtype].short}{precision} {case.direction}", 120)


def cases_of_graphs(groups: Sequence[tuple[str, Sequence[Result]]]) -> Iterable[CaseResults]:
    """Yield cases without records. groups: the name of each, and its results; a single one is named by its compiler."""
    names = Counter(name for name, _ in groups)
    for number, (name, members) in enumerate(groups):
        id = name if names[name] == 1 else f"{name}/{members[0].number}"
        if len(members) == 1 and (graph := members[0].graph) is not None and graph.compiler:
            members = [members[0].labelled(graph.compiler)]
        yield CaseResults(number, id, name, "", None, tuple(members))


def recorded_on(results: Iterable[Result]) -> str:
    """Return the GPU whose recorded times the records have, as "H200"; "" where they have none."""
    known = {str(result.row.target).upper() for result in results if result.row.recorded_time_us is not None}
    return printable(" and ".join(sorted(known)), 100)
