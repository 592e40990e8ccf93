"""`CaseResults`: the results of one case, ranked and compared with each other."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ..graph.analyse.roofline import Ceilings
from ..graph.findings.collect import findings
from ..graph.findings.finding import Finding
from ..plan import paired_rounds
from ..spec.blocks import REPLAYS, UNFUSED
from ..spec.case import Case
from .launch_gaps import launch_gaps
from .result import Result

# These implementations run without fusion on purpose, so findings and missed fusions leave them out.
BASELINES = frozenset(UNFUSED.values())


@dataclass(frozen=True)
class CaseResults:
    """A case and its results, in the order of the path.

    number: the case's position, from 0. id: unique in the path. block: its block's name, or that of a module or file.
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
        judged = {}
        for result in self.results:
            if (best := self.best(result)) is not None and best is not result:
                judged[result.name] = paired_rounds.compare_rounds(result.rounds, best.rounds)
        return judged

    @property
    def ceilings(self) -> Ceilings | None:
        """The ceilings of the device or target; None where no one device has all graphs."""
        devices = {result.ceilings_of: result.ceilings for result in reversed(self.results) if result.ceilings}
        return next(iter(devices.values())) if len(devices) == 1 else None

    @cached_property
    def findings(self) -> list[Finding]:
        """The findings in the times and in the graphs, these with times if the ceilings of the device are known."""
        results = self.with_own_kernels
        graphs = {result.name: graph for result in results if (graph := result.timed_graph) is not None}
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
