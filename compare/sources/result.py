"""`Result`: a record, a fusion graph, or both, as a path holds them."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..base.text import printable
from ..base.usage import UsageError
from ..plan import paired_rounds
from ..record.record import Record
from ..record.run_files import recorded_file
from .row import Group, Row

if TYPE_CHECKING:
    from xlafuse.dumps.dump_folder import Artifacts

    from ..graph.analyse.roofline import Ceilings
    from ..graph.model import FusionGraph


@dataclass(frozen=True)
class Launch:
    """One kernel, copy or memset that ran (see compare.graph.join.kernel_records). start, end: in seconds."""

    name: str
    start: float
    end: float


@dataclass(frozen=True, eq=False)
class Result:
    """A record, a fusion graph, or both.

    id: the record's, or the module's or the file's name. number: the place in the path, from 1. read: returns the
    graph; None where none was recorded. label: its name among others of its case; by default the implementation or the
    id. graph_only: its record's numbers are not shown, as beside a result of another run. cost: bytes of text, the
    order of the list; None where unknown. order: XLA's number of the module. segment_ceilings: of the segment of a run.
    artifacts: of an XLA module. uncalibrated: the clocks of its segment's workers disagree. groups: the rows of
    all results of the path by `Row.group`. program: returns what the graph is made of, an HLO module or what Inductor
    wrote; None where a path has the graph alone. made_by: the program that made a record (compare.base.program), where
    known.
    """

    id: str
    number: int
    path: Path
    read: Callable[[], FusionGraph] | None
    label: str = ""
    graph_only: bool = False
    cost: int | None = None
    order: int = 0
    record: Record | None = None
    segment_ceilings: Ceilings | None = None
    artifacts: Artifacts | None = None
    uncalibrated: bool = False
    groups: Mapping[Group, list[Row]] = field(default_factory=dict)
    program: Callable[[], Any] | None = None
    made_by: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The label, else the implementation, else the name of a graph without a record."""
        return self.label or (self.id if self.record is None else self.record.implementation)

    @cached_property
    def row(self) -> Row:
        """The values that reports show."""
        return Row(
            self.id, self.name, self.number, None if self.graph_only else self.record, self.segment_ceilings,
            self.uncalibrated, self.groups, lambda: self.graph, lambda: self.ceilings, lambda: self.predicted_graph,
        )

    @cached_property
    def predicted_graph(self) -> FusionGraph | None:
        """The graph with a predicted time for each kernel, beside a measured one; None without a readable graph.

        compare.predict.times says which kernels have none.
        """
        from ..predict.times import with_predictions

        return None if self.graph is None else with_predictions(self.graph, self.ceilings, self.ran_on)

    @property
    def ran_on(self) -> str:
        """The name of the device that a record was checked on; "" without a record."""
        return (self.record and self.record.checked and self.record.checked.device) or ""

    @property
    def timed_graph(self) -> FusionGraph | None:
        """The graph with predicted times where no kernel of it was measured; None without a readable graph."""
        return self.graph if self.graph is not None and self.graph.measured else self.predicted_graph

    def labelled(self, label: str) -> Result:
        """Return the result under another name, with its graph that was read, and without its record's numbers."""
        return replace(self, label=label, read=reader_of(self.load()), graph_only=True)

    def load(self) -> FusionGraph:
        """Return the graph. Raises UsageError, which names the file, where reading fails or nothing could be read."""
        if self._problem is not None:
            raise UsageError(self._problem)
        assert self.graph is not None
        return self.graph

    @property
    def graph(self) -> FusionGraph | None:
        """The graph; None if none was recorded or it is unreadable."""
        return self._loaded[0]

    @property
    def unreadable(self) -> str | None:
        """The reason why the recorded graph cannot be read; None where none was recorded."""
        return None if self.read is None else self._problem

    @property
    def _problem(self) -> str | None:
        return self._loaded[1]

    @cached_property
    def _loaded(self) -> tuple[FusionGraph | None, str | None]:
        if self.read is None:
            return None, f"{self.path}: {self.id}: no graph recorded"
        try:
            with reading_errors_as_usage(self.path):
                graph = self.read()
        except UsageError as problem:
            return None, str(problem)
        if graph.unparsed and graph.kernels == ():
            lines = f"{len(graph.unparsed)} line{'s' * (len(graph.unparsed) > 1)}"
            return None, (
                f"{self.path}: {self.id}: no kernels found, and {lines} could not be read; the first is "
                f"{printable(graph.unparsed[0], 100)!r}"
            )
        return graph, None

    def compiled(self) -> list[tuple[str, Artifacts]]:
        """Return the XLA modules behind the graph by name: itself, or those in its record's archive, forward first.

        The list is empty where another compiler made the graph. Raises UsageError for an unreadable archive.
        """
        if self.artifacts is not None:
            return [(self.id, self.artifacts)]
        if self.record is None or self.record.dumps is None:
            return []
        from xlafuse.dumps import dump_folder

        with reading_errors_as_usage(self.path):
            packed = recorded_file(self.path, self.record, self.record.dumps)
            made = dump_folder.modules(dump_folder.Archive(str(packed), packed.read_bytes()))
        made.sort(key=lambda module: (module.name == "backward", module.name))
        return [(f"{self.id} {m.name}" if len(made) > 1 else self.id, m.artifacts) for m in made]

    # Prices

    def priced_for(self, target: str | None) -> tuple[Ceilings | None, str]:
        """Return the ceilings that price the graph, and their origin.

        These are `target`'s if one is named, else the run's own, else those of the device that the graph was compiled
        for, or None. For a record, they are at its case's precision.

        Raises UsageError where the graph cannot be read, and where a target is named for code that runs on another kind
        of device.
        """
        from .. import targets
        from .target_ceilings import origin, own_ceilings, target_ceilings

        graph = self.load()
        ceilings, whose = self.segment_ceilings, "this run's device"
        if target is not None:
            ceilings, whose = target_ceilings(target), origin(target)
            kind = "tpu" if graph.target.startswith("tpu") else graph.target
            if kind == "cpu" or (kind == "tpu") != targets.is_tpu(target):
                device = kind.upper() if kind in ("cpu", "tpu") else graph.target or "GPU"
                raise UsageError(f"{self.path}: compiled for the {device}; {target} cannot price its bytes")
        elif ceilings is None:
            ceilings, whose = own_ceilings(graph)
        return ceilings and ceilings.at(None if self.record is None else self.record.case.precision), whose

    @property
    def ceilings(self) -> Ceilings | None:
        """The measured rates of the device or the target that `ceilings_of` names; None without a readable graph."""
        ceilings = self._priced[0]
        return ceilings if ceilings is not None and ceilings.streams else None

    @property
    def ceilings_of(self) -> str:
        from_run = self.graph_only and self.segment_ceilings is not None  # another run need not have this one's device
        return f"the device of {self.path}" if from_run else self._priced[1]

    @cached_property
    def _priced(self) -> tuple[Ceilings | None, str]:
        return (None, "") if self.graph is None else self.priced_for(None)

    # Times

    @property
    def time_us(self) -> float | None:
        """The device time of a call."""
        return self.row.device_time_us

    @property
    def rounds(self) -> paired_rounds.Rounds:
        return self.row.rounds

    @property
    def group(self) -> Group:
        """A value that is equal for results whose times may be compared."""
        return self.row.group

    @cached_property
    def launches(self) -> dict[str, tuple[Launch, ...]]:
        """The kernels, copies and memsets of a median call, by phase."""
        return {
            phase: tuple(Launch(ran.name, ran.start, ran.end) for ran in times.records or ())
            for phase, times in self.row.times.items()
        }


def reader_of(graph: FusionGraph) -> Callable[[], FusionGraph]:
    """Return the `read` of a result whose graph was read before."""
    return lambda: graph


@contextmanager
def reading_errors_as_usage(path: Path) -> Iterator[None]:
    """Turn errors of the file readers into a UsageError that names the file."""
    try:
        yield
    except (EOFError, OSError, RecursionError, ValueError, zlib.error) as problem:
        words = str(problem) or type(problem).__name__
        if isinstance(problem, OSError) and problem.filename and problem.strerror:
            words = f"{problem.filename}: {problem.strerror}"
        raise UsageError(words if str(path) in words else f"{path}: {words}") from None
