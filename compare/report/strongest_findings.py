"""The strongest findings of a run: its largest costs, each in a few sentences with its times.

    strongest(open_source(folder))
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from .. import targets
from ..base.text import printable
from ..graph import formats
from ..graph.analyse.products import passed_on
from ..graph.findings.finding import FACTS, Finding, rank
from ..graph.findings.view import display_name
from ..graph.model import Buffer, FusionGraph
from ..graph.operations import cause
from ..plan import paired_rounds
from ..sources.case_results import CaseResults
from ..sources.result import Result
from ..sources.source import Source
from ..sources.target_ceilings import target_ceilings

MOST = 5


@dataclass(frozen=True)
class StrongFinding:
    """A finding of a run.

    at_stake_us: the time that the finding is about; in a timed run at most the difference to a better implementation.
        None for a fact, and if the graphs' device, and so its bandwidth, is not known.
    headline: the finding in words. kind: the kind of compare.graph.findings.finding. bytes: the traffic behind it.
    case: the block and the case in words. case_id: its id. predicted: at_stake_us is of predicted times.
    """

    at_stake_us: float | None
    bytes: int
    headline: str
    case: str
    case_id: str
    kind: str
    block: str
    implementation: str
    predicted: bool = False

    @property
    def worth(self) -> str:
        """The time at stake in words; "" where it is not known."""
        us = self.at_stake_us
        return "" if us is None else f"worth up to {'~' if self.predicted else ''}{formats.span(us)}"


def every_finding(source: Source) -> list[StrongFinding]:
    """Return all findings of a run, timed or not, strongest first, facts last."""
    return sorted(_ranked(each for case in source.cases for each in of_case(case)), key=lambda each: each.kind in FACTS)


def strongest(source: Source, most: int = MOST) -> list[StrongFinding]:
    """Return the strongest findings of a run, timed or not, strongest first, without facts.

    At most one for each block and two of one kind are chosen while others are left.
    """
    candidates = [each for each in every_finding(source) if each.kind not in FACTS]
    chosen: list[StrongFinding] = []
    for per_block, per_kind in ((1, 2), (2, 3), (most, most)):
        for each in candidates:
            blocks, kinds = [one.block for one in chosen], [one.kind for one in chosen]
            if len(chosen) < most and each not in chosen:
                if blocks.count(each.block) < per_block and kinds.count(each.kind) < per_kind:
                    chosen.append(each)
    return _ranked(chosen)


def _ranked(found: Iterable[StrongFinding]) -> list[StrongFinding]:
    by_bytes = sorted(found, key=lambda each: -each.bytes)
    return rank(by_bytes, lambda each: each.implementation, lambda each: each.at_stake_us or 0.0)


def of_case(case: CaseResults) -> Iterator[StrongFinding]:
    """Yield the facts, and the findings that are worth a known time; all of them where no device is known."""
    results = {result.name: result for result in case.results}
    unpriced = case.ceilings is None
    for finding in case.findings:
        subject = _FindingInRun(finding, results[finding.graphs[0]], [results[name] for name in finding.graphs[1:]])
        at_stake = subject.at_stake_us
        if unpriced or finding.is_fact or (at_stake is not None and (subject.call_us is not None or not case.timed)):
            yield StrongFinding(
                at_stake, finding.bytes, printable(subject.headline, 600),
                f"{printable(case.block, 60)} {case.label}".rstrip(), case.id, finding.kind, case.block,
                subject.worse.name, finding.predicted,
            )


@dataclass(frozen=True)
class _FindingInRun:
    """A finding with the implementation that it is about, and the better ones."""

    finding: Finding
    worse: Result
    better: list[Result]

    @property
    def graph(self) -> FusionGraph:
        assert self.worse.graph is not None
        return self.worse.graph

    @property
    def name(self) -> str:
        return display_name(self.worse.name)

    @property
    def call_us(self) -> float | None:
        return self.worse.time_us

    @property
    def kernels_us(self) -> float | None:
        """The measured time of the finding's kernels; None if any is unknown."""
        indices = self.finding.kernels.get(self.worse.name, ())
        times = [(self.graph.kernels or ())[index].device_time_us for index in indices]
        return sum(time for time in times if time is not None) if times and None not in times else None

    @cached_property
    def fastest(self) -> Result | None:
        """The fastest of the better implementations, if it is faster beyond the noise."""
        timed = [result for result in self.better if result.time_us is not None and result.group == self.worse.group]
        best = min(timed, key=lambda result: result.time_us or 0.0, default=None)
        judged = None if best is None else paired_rounds.compare_rounds(self.worse.rounds, best.rounds)
        return best if judged is not None and judged.word == "slower" else None

    @property
    def at_stake_us(self) -> float | None:
        """The time that the finding is worth; None if the measured times contradict a comparison."""
        us, call = self.finding.us, self.call_us
        if us is None or call is None:
            return us
        if self.finding.kind not in ("kept on chip", "saved", "intermediates", "more FLOPs"):
            return min(us, call)
        if self.fastest is None:
            return None
        spent = self.kernels_us if self.finding.kind == "kept on chip" else None
        return min(us if spent is None else spent, call - (self.fastest.time_us or 0.0))

    @property
    def headline(self) -> str:
        """The finding, its time, and the times of the call and of the better implementation."""
        match self.finding.kind:
            case "saved" | "intermediates":
                text = self._kept_more()
            case "above roofline":
                text = self.finding.text
            case "launch gaps" | "inside a product":
                return self.finding.text
            case "kept on chip" if self.call_us is not None and self.kernels_us is not None:
                text = f"{self.finding.text} These kernels take {formats.span(self.kernels_us)}."
            case _:
                text = f"{self.finding.text} {self._priced()}".rstrip()
        if self.call_us is None:
            return text
        best = self.fastest
        faster = f", {display_name(best.name)} {formats.span(best.time_us or 0.0)}" if best else ""
        return f"{text} {self.name} takes {formats.span(self.call_us)}{faster}."

    def _priced(self) -> str:
        """ "At memory bandwidth, that takes 8.39 µs."; "" where the bandwidth is not known. """
        if self.finding.us is None:
            return ""
        if self.finding.predicted:
            return f"That takes ~{formats.span(self.finding.us)}."
        flops = self.finding.kind in ("more FLOPs", "dense ragged product")
        known = targets.of_device(self.graph.target)
        sheet = "" if known is None else target_ceilings(known).data_sheet  # "" where it was measured
        bandwidth = f"At the {sheet}'s memory bandwidth" if sheet else "At memory bandwidth"
        start = "At the rate of matrix products, the extra FLOPs take" if flops else f"{bandwidth}, that takes"
        return f"{start} {formats.span(self.finding.us)}."

    def _kept_more(self) -> str:
        """ "XLA keeps 11.8 GB for the backward pass; Triton keeps 1.05 MB. The largest array is 4.29 GB of scores
        (attention.py:23)." """
        saved = self.finding.kind == "saved"
        kept = _kept(self.graph, saved)
        verb, purpose = ("keeps", "for the backward pass") if saved else ("writes", "of intermediate arrays to memory")
        text = f"{self.name} {verb} {formats.size(sum(buffer.bytes for buffer in kept))} {purpose}"
        # Without times, the last one is the one that keeps least.
        rival = self.fastest if self.call_us is not None or not self.better else self.better[-1]
        if rival is not None and rival.graph is not None:
            rivals = sum(buffer.bytes for buffer in _kept(rival.graph, saved))
            text += f"; {display_name(rival.name)} {verb} {formats.size(rivals)}"
        largest = f" The largest array is {self._described(kept[0])}." if kept else ""
        return f"{text}.{largest}" + ("" if self.call_us is not None else f" {self._priced()}")

    def _described(self, buffer: Buffer) -> str:
        """ "2.15 GB of scores (attention.py:23)", or "2.15 GB, bf16[64,4096,4096]" without a stage. """
        found = cause(self.graph, buffer.name)
        name = f" of {', '.join(found.stages)}" if found.stages else f", {formats.shape(buffer)}"
        return f"{formats.size(buffer.bytes)}{name}{f' ({formats.place(found.line)})' if found.line else ''}"


def _kept(graph: FusionGraph, saved: bool) -> list[Buffer]:
    """Return the buffers that forward saves, or that one kernel writes for another, largest first.

    Partial sums of split-K products are neither.
    """
    if saved:
        return sorted(graph.saved, key=lambda buffer: -buffer.bytes)
    return [buffer for buffer in passed_on(graph) if buffer.role == "intermediate"]
